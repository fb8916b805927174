"""Memory that grows where it is: against a driver that keeps accounts, and on a GPU."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import AsyncEngine, synthetic
from asyncllm.errors import ModelLoadError, OptionsError
from asyncllm.kv import device_memory
from asyncllm.kv import pool as pool_module
from asyncllm.kv.block_pool import BlockPool, Room
from asyncllm.kv.device_memory import (
    CudaDriver,
    DeviceMemoryError,
    GrowingBuffers,
    OutOfDeviceMemoryError,
)
from asyncllm.kv.pool import RESERVE_BYTES, KvPool
from asyncllm.loading import build
from asyncllm.options import EngineOptions
from asyncllm.runner.backend import Backend
from asyncllm.scheduler.step import LayerGroup

# Triton looks at it when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 1 << 20
PIECE = 2 * MIB
OUT_OF_MEMORY, INVALID = 2, 1


@dataclass
class FakeCuda:
    """The driver's functions with the rules of their documentation, and no device.

    `spare` pieces are left; the call number `fails_at` of the function `fails` returns `error`.
    """

    spare: int = 1000
    fails: str = ""
    fails_at: int = 0
    error: int = OUT_OF_MEMORY
    supported: int = 1
    reserved: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # bytes, handle
    handles: dict[int, int] = field(default_factory=dict)  # pieces
    released: set[int] = field(default_factory=set)
    accessible: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cuMem"):
            return found

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.fails and self.calls.count(name) == self.fails_at:
                return self.error
            return int(found(*arguments))

        return call

    def cuGetErrorName(self, result: int, text: Any) -> int:
        names = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", INVALID: b"CUDA_ERROR_INVALID_VALUE"}
        text._obj.value = names[result]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (102, 3)
        value._obj.value = self.supported
        return 0

    def cuMemGetAllocationGranularity(self, size: Any, kind: Any, flags: int) -> int:
        assert (kind._obj.type, kind._obj.location.type, kind._obj.location.id) == (1, 1, 3)
        assert flags == 0
        size._obj.value = PIECE
        return 0

    def cuMemAddressReserve(
        self, address: Any, nbytes: int, alignment: int, wanted: int, flags: int
    ) -> int:
        assert alignment == wanted == flags == 0
        if nbytes <= 0 or nbytes % PIECE:
            return INVALID
        end = max((start + size for start, size in self.reserved.items()), default=1 << 40)
        self.reserved[end + PIECE] = nbytes
        address._obj.value = end + PIECE
        return 0

    def cuMemAddressFree(self, address: int, nbytes: int) -> int:
        inside = any(address <= start < address + nbytes for start in self.mapped)
        if self.reserved.get(address) != nbytes or inside:
            return INVALID
        del self.reserved[address]
        return 0

    def cuMemCreate(self, handle: Any, nbytes: int, kind: Any, flags: int) -> int:
        assert kind._obj.requested_handle_types == flags == 0
        if nbytes <= 0 or nbytes % PIECE:
            return INVALID
        if nbytes // PIECE > self.spare:
            return OUT_OF_MEMORY
        self.spare -= nbytes // PIECE
        handle._obj.value = len(self.released) + len(self.handles) + 7
        self.handles[handle._obj.value] = nbytes // PIECE
        return 0

    def cuMemRelease(self, handle: int) -> int:
        if handle not in self.handles or handle in self.released:
            return INVALID
        self.released.add(handle)
        self._free(handle)
        return 0

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> int:
        within = any(
            start <= address and address + nbytes <= start + size
            for start, size in self.reserved.items()
        )
        taken = any(
            address < start + size and start < address + nbytes
            for start, (size, _) in self.mapped.items()
        )
        fits = self.handles.get(handle) == nbytes // PIECE and handle not in self.released
        if offset or flags or not within or taken or not fits:
            return INVALID
        self.mapped[address] = nbytes, handle
        return 0

    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> int:
        found = access._obj
        assert (found.location.type, found.location.id, found.flags, count) == (1, 3, 3, 1)
        if self.mapped.get(address, (0, 0))[0] != nbytes:
            return INVALID
        self.accessible.add(address)
        return 0

    def cuMemUnmap(self, address: int, nbytes: int) -> int:
        if self.mapped.get(address, (0, 0))[0] != nbytes:
            return INVALID
        _, handle = self.mapped.pop(address)
        self.accessible.discard(address)
        self._free(handle)
        return 0

    def _free(self, handle: int) -> None:
        if handle in self.released and all(used != handle for _, used in self.mapped.values()):
            self.spare += self.handles[handle]

    @property
    def is_empty(self) -> bool:
        return not self.reserved and not self.mapped and self.released == set(self.handles)


class FakeDriver(CudaDriver):
    """The driver over fake functions; a buffer's bytes are in the host's memory."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.cached = 0  # pieces that torch has and does not need
        self.others = 0  # pieces that are gone when they are asked for
        self.waits = 0
        super().__init__("cuda:3", cuda)

    def tensor(self, address: int, nbytes: int, owner: object) -> Tensor:
        assert address in self.cuda.accessible
        return torch.zeros(nbytes, dtype=torch.uint8)

    def free_bytes(self) -> int:
        return (self.cuda.spare + self.others) * PIECE

    def trim(self) -> None:
        self.cuda.spare += self.cached
        self.cached = 0

    def wait(self) -> None:
        self.waits += 1


def driver(**cuda: Any) -> FakeDriver:
    return FakeDriver(FakeCuda(**cuda))


def lengths(cuda: FakeCuda) -> list[int]:
    """Pieces that each reservation has from its start on, without a gap, accessible."""
    found = []
    for start in cuda.reserved:
        end = start
        while end in cuda.accessible:
            end += cuda.mapped[end][0]
        found.append((end - start) // PIECE)
    assert sum(found) * PIECE == sum(nbytes for nbytes, _ in cuda.mapped.values())
    return found


def test_the_structures_are_laid_out_as_in_cuda_h() -> None:
    fields = [name for name, *_ in device_memory.Allocation._fields_]
    offsets = [getattr(device_memory.Allocation, name).offset for name in fields]
    assert offsets == [0, 4, 8, 16, 24]
    assert ctypes.sizeof(device_memory.Allocation) == 32
    assert device_memory.Access.flags.offset == 8
    assert ctypes.sizeof(device_memory.Access) == 12


def test_addresses_are_reserved_in_full_and_memory_is_mapped_from_their_start() -> None:
    made = driver()
    buffers = GrowingBuffers(made, 4, 5 * PIECE + 1)
    assert list(made.cuda.reserved.values()) == [6 * PIECE] * 4
    assert (buffers.mapped_bytes, lengths(made.cuda)) == (0, [0] * 4)
    for nbytes, pieces in [(1, 1), (PIECE, 1), (PIECE + 1, 2), (1, 2), (4 * PIECE, 4)]:
        buffers.extend(nbytes, 0)
        assert (buffers.mapped_bytes, lengths(made.cuda)) == (pieces * PIECE, [pieces] * 4)
    buffers.extend(100 * PIECE, 0)  # no more than was reserved
    assert lengths(made.cuda) == [6] * 4
    assert buffers.taken_bytes == 24 * PIECE


@pytest.mark.parametrize("spare", range(14))
@pytest.mark.parametrize("others", [0, 5, 100], ids="others-{}".format)
def test_where_memory_ends_all_buffers_have_the_same_and_no_less_than_there_is(
    spare: int, others: int
) -> None:
    made = driver(spare=spare)
    made.others = others  # what is said to be free but is not
    buffers = GrowingBuffers(made, 3, 9 * PIECE)
    buffers.extend(4 * PIECE, 0)
    each = min(4, spare // 3)
    assert (buffers.mapped_bytes, lengths(made.cuda)) == (each * PIECE, [each] * 3)
    assert made.cuda.spare == spare - 3 * each
    made.cuda.spare = 100
    buffers.extend(5 * PIECE, 0)
    assert lengths(made.cuda) == [5] * 3


def test_what_shall_stay_free_does() -> None:
    made = driver(spare=20)
    buffers = GrowingBuffers(made, 3, 9 * PIECE)
    buffers.extend(9 * PIECE, 10 * PIECE)
    assert lengths(made.cuda) == [3] * 3
    assert made.cuda.spare == 11


@pytest.mark.parametrize("others", [0, 100], ids=["told", "found-out"])
def test_torch_gives_back_what_it_does_not_need_before_growth_is_refused(others: int) -> None:
    made = driver(spare=2)
    made.cached, made.others = 4, others
    buffers = GrowingBuffers(made, 3, 4 * PIECE)
    buffers.extend(2 * PIECE, 0)
    assert lengths(made.cuda) == [2] * 3


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, INVALID])
def test_a_growth_that_fails_halfway_is_undone(call: str, at: int, error: int) -> None:
    made = driver()
    buffers = GrowingBuffers(made, 3, 9 * PIECE)
    before = made.cuda.spare
    made.cuda.fails, made.cuda.fails_at, made.cuda.error = call, at, error
    if error == OUT_OF_MEMORY:
        buffers.extend(PIECE, 0)
        each = 1  # the second time it went well, over nothing that was left
    else:
        with pytest.raises(DeviceMemoryError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
            buffers.extend(PIECE, 0)
        each = 0
    assert (buffers.mapped_bytes, lengths(made.cuda)) == (each * PIECE, [each] * 3)
    assert made.cuda.spare == before - 3 * each
    buffers.close()
    assert made.cuda.is_empty


def test_closing_waits_for_the_device_and_gives_everything_back_once() -> None:
    made = driver()
    buffers = GrowingBuffers(made, 3, 9 * PIECE)
    buffers.extend(PIECE, 0)
    buffers.extend(5 * PIECE, 0)
    made.waits = 0
    buffers.close()
    assert made.cuda.is_empty
    assert made.cuda.spare == 1000
    buffers.close()
    assert made.waits == 1


def test_buffers_that_nobody_refers_to_are_given_back() -> None:
    made = driver()
    buffers = GrowingBuffers(made, 3, 9 * PIECE)
    buffers.extend(PIECE, 0)
    del buffers
    gc.collect()
    assert made.cuda.is_empty


def test_addresses_that_cannot_all_be_reserved_are_given_back() -> None:
    made = driver(fails="cuMemAddressReserve", fails_at=3)
    with pytest.raises(OutOfDeviceMemoryError, match="cuMemAddressReserve"):
        GrowingBuffers(made, 4, PIECE)
    assert made.cuda.is_empty


def test_a_device_without_virtual_memory_says_so() -> None:
    with pytest.raises(DeviceMemoryError, match=r"cuda:3 has no virtual memory"):
        driver(supported=0)


# The pool

TOKENS, HEADS, WIDTH = 16, 2, 64
SIZE = TOKENS * HEADS * WIDTH * 2  # of a block in a buffer, 16 bits an element: 4 KiB


def groups(*capacities: int, size: int = SIZE) -> list[LayerGroup]:
    """The first has layers 0 and 2, the second layer 1 under a window."""
    made = [LayerGroup(None, (0, 2), 4 * size), LayerGroup(32, (1,), 2 * size)]
    return [replace(g, capacity=c) for g, c in zip(made, capacities, strict=True)]


def gpu_pool(*capacities: int, device: str = "cuda:3") -> KvPool:
    return KvPool(
        groups(*capacities),
        block_tokens=TOKENS,
        kv_heads=HEADS,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        device=device,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = driver()
    monkeypatch.setattr(pool_module, "CudaDriver", lambda device: made)
    monkeypatch.setattr(pool_module, "RESERVE_BYTES", 0)
    return made


def test_a_pool_starts_with_a_piece_and_grows_by_what_is_granted(fake: FakeDriver) -> None:
    made = gpu_pool(5000, 10)
    assert made.keys[2].shape == (5000, TOKENS, HEADS, WIDTH)
    assert made.values[1].shape == (10, TOKENS, HEADS, WIDTH)
    assert lengths(fake.cuda) == [1] * 6
    assert (made.pool_bytes, made.granted) == (6 * PIECE, [0, 0])
    assert made.grow(0, 512) == 512  # just what the first pieces hold
    assert made.grow(1, 11) == 10
    assert made.pool_bytes == 6 * PIECE
    assert made.grow(0, 1) == 1
    assert lengths(fake.cuda) == [2] * 4 + [1] * 2
    assert made.pool_bytes == 10 * PIECE
    assert made.grow(0, 1 << 20) == 5000 - 513
    assert made.grow(0, 1) == 0
    assert lengths(fake.cuda) == [10] * 4 + [1] * 2
    assert (made.granted, made.growths) == ([5000, 10], 4)
    made.close()
    made.close()
    assert fake.cuda.is_empty


def test_blocks_across_the_border_of_pieces_are_granted_with_both(fake: FakeDriver) -> None:
    odd = LayerGroup(None, (0,), 2 * 7 * 16 * 80 * 2, 200)  # 17920 bytes a buffer
    made = KvPool(
        [odd], block_tokens=16, kv_heads=7, head_dim=80, dtype=torch.float16, device="cuda:3"
    )
    assert made.grow(0, 117) == 117  # 117.03 in a piece
    assert lengths(fake.cuda) == [1] * 2
    assert made.grow(0, 1) == 1
    assert lengths(fake.cuda) == [2] * 2


def test_a_pool_grants_what_all_layers_have_memory_for(fake: FakeDriver) -> None:
    made = gpu_pool(5000, 5000)
    fake.cuda.spare = 11  # for two pieces of each of four buffers
    blocks = BlockPool(5000, lambda asked: made.grow(0, asked))
    for _ in range(2000):
        if blocks.supply(1, True) is not Room.READY:
            break
        blocks.take()
    assert blocks.used == blocks.total == 3 * 512
    assert lengths(fake.cuda) == [3] * 4 + [1] * 2
    assert made.grow(0, 1) == 0
    assert made.grow(1, 1024) == 1024  # what the other group could not use
    fake.cuda.spare = 4
    assert blocks.retry_growth()
    assert blocks.supply(1, True) is Room.READY


def test_int8_has_its_scales_in_memory_that_grows_with_it(fake: FakeDriver) -> None:
    group = LayerGroup(None, (0, 1, 2), 6 * (TOKENS * HEADS * WIDTH + 4 * TOKENS * HEADS), 20_000)
    made = KvPool(
        [group],
        block_tokens=TOKENS,
        kv_heads=HEADS,
        head_dim=WIDTH,
        dtype=torch.int8,
        device="cuda:3",
    )
    assert made.keys[1].shape == (20_000, TOKENS, HEADS, WIDTH)
    assert made.scales[1][0].shape == (20_000, HEADS, TOKENS)
    assert lengths(fake.cuda) == [1] * 7
    assert made.grow(0, 1024) == 1024  # 2 KiB of each K and V, 768 bytes of scales
    assert lengths(fake.cuda) == [1] * 7
    assert made.grow(0, 2000) == 2000
    assert lengths(fake.cuda) == [2] + [3] * 6
    fake.cuda.spare = 13  # two go to scales for 6000 more, so each K and V has one
    assert made.grow(0, 6000) == 4 * 1024 - 3024
    assert lengths(fake.cuda) == [4] * 7
    assert made.grow(0, 1) == 0
    assert made.pool_bytes == sum(lengths(fake.cuda)) * PIECE
    made.close()
    assert fake.cuda.is_empty


def test_a_pool_keeps_the_reserve_free(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gpu_pool(5000, 10)
    monkeypatch.setattr(pool_module, "RESERVE_BYTES", RESERVE_BYTES)
    fake.cuda.spare = RESERVE_BYTES // PIECE + 7
    assert made.grow(0, 5000) == 2 * 512
    fake.cuda.spare = 0
    assert made.grow(0, 1) == 0


def test_a_pool_that_cannot_start_says_why_and_keeps_nothing(fake: FakeDriver) -> None:
    fake.cuda.spare = 5  # the second group's two buffers need one more
    with pytest.raises(ModelLoadError, match=rf"cuda:3 has .* 2 K/V buffers .* {PIECE} bytes"):
        gpu_pool(5000, 10)
    assert fake.cuda.is_empty
    fake.cuda.spare = 100
    fake.cuda.fails, fake.cuda.fails_at, fake.cuda.error = "cuMemAddressReserve", 12, INVALID
    with pytest.raises(DeviceMemoryError, match="cuMemAddressReserve"):
        for _ in range(3):
            gpu_pool(5000, 10).close()
    assert fake.cuda.is_empty


class Unhurried:
    """Loads without being watched."""

    def progress(self, report: object) -> None:
        """Nobody listens."""

    def should_stop(self) -> bool:
        return False


def test_a_load_that_fails_after_the_pool_was_made_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[KvPool] = []

    def runner(self: Backend, model: object, pool: KvPool, **more: object) -> Any:
        pools.append(pool)
        assert pool.keys
        raise RuntimeError("no room for activations")

    monkeypatch.setattr(Backend, "runner", runner)
    path = tmp_path / "tiny.gguf"
    synthetic.write("tiny-q4_k_m", path)
    options = EngineOptions(device="cpu", widen_weights=True, kv_bytes=1 << 20)
    with pytest.raises(RuntimeError, match="activations"):
        build(path, options, Unhurried())
    assert [len(pool.keys) for pool in pools] == [0]


def test_int8_is_refused_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    synthetic.write("tiny-q4_k_m", path)
    for plain in (True, False):
        options = EngineOptions(
            device="cpu", kv_dtype="int8", widen_weights=plain, tune_dir=tmp_path
        )
        with pytest.raises(OptionsError, match=r'kv_dtype="int8": .* a floating-point type'):
            build(path, options, Unhurried())


# On a GPU


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


@pytest.fixture
def no_leak() -> Iterator[None]:
    """What the device has free before and after is the same, up to its own small change.

    The first kernels and graphs of a process leave the driver some tens of MiB.
    """
    torch.ones(1, device="cuda").sum().item()
    gc.collect()
    before = free_bytes()
    yield
    gc.collect()
    assert free_bytes() > before - 128 * MIB


def hog(leave: int) -> Tensor:
    """Take what the device has, but for so many bytes."""
    return torch.empty(free_bytes() - leave, dtype=torch.uint8, device="cuda")


@on_gpu
@pytest.mark.usefixtures("no_leak")
def test_growing_keeps_pointers_and_contents_and_closing_gives_memory_back() -> None:
    before = free_bytes()
    made = gpu_pool(20_000, 600, device="cuda")
    assert made.grow(0, 3) == 3
    assert before - free_bytes() <= 6 * PIECE + 16 * MIB
    buffers = {("k", n): each for n, each in made.keys.items()}
    buffers |= {("v", n): each for n, each in made.values.items()}
    pointers = {name: each.data_ptr() for name, each in buffers.items()}
    for number, each in enumerate(buffers.values()):
        assert each.dtype == torch.bfloat16
        each[:3] = torch.arange(3, device="cuda").view(3, 1, 1, 1) + 10 * number
    assert made.grow(0, 9_997) == 9_997
    assert made.grow(1, 600) == 600
    taken = before - free_bytes()
    assert abs(taken - made.pool_bytes) <= 8 * MIB
    for number, (name, each) in enumerate(buffers.items()):
        assert each.data_ptr() == pointers[name]
        assert (each[:3, 0, 0, 0].cpu() == torch.arange(3) + 10 * number).all()
    for layer in (0, 2):  # the last granted block, across all pieces
        made.keys[layer][9_999] = layer + 1
        made.values[layer][9_999] = layer + 2
    made.copy(0, 9_999, 5)
    assert (made.keys[2][5] == 3).all()
    assert (made.values[0][5] == 2).all()
    made.close()
    del buffers, each
    assert before - free_bytes() <= 8 * MIB


@on_gpu
@pytest.mark.usefixtures("no_leak")
@pytest.mark.parametrize("reserve", [RESERVE_BYTES, 0], ids=["reserve", "to-the-end"])
def test_at_the_end_of_the_memory_less_is_granted_and_later_more(
    reserve: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "RESERVE_BYTES", reserve)
    if reserve == 0:  # found out by trying
        monkeypatch.setattr(CudaDriver, "free_bytes", lambda self: 1 << 50)
    made = gpu_pool(200_000, 10, device="cuda")
    assert made.grow(0, 16) == 16
    for each in (*made.keys.values(), *made.values.values()):
        each[0] = 1.0  # what torch loads for this takes memory too
    held = hog(reserve + 300 * MIB)
    granted = made.grow(0, 100_000)  # 1.6 GB
    assert 50 * MIB // (4 * SIZE) < granted < 320 * MIB // (4 * SIZE)
    again = made.grow(0, 100_000)
    assert again < 40 * MIB // (4 * SIZE)
    last = made.granted[0] - 1
    for layer in (0, 2):
        made.keys[layer][last] = 1.0
        made.values[layer][last] = 2.0
    torch.cuda.synchronize()
    del held  # torch keeps it, and gives it back for this
    assert made.grow(0, 100_000 - last) == 100_000 - last
    assert (made.keys[2][last] == 1.0).all()
    made.close()


@on_gpu
@pytest.mark.usefixtures("no_leak")
def test_two_pools_share_a_device_until_both_are_refused() -> None:
    first, second = (gpu_pool(200_000, 10, device="cuda") for _ in range(2))
    held = hog(RESERVE_BYTES + 600 * MIB)
    grown = [0, 0]
    for turn in itertools.count():
        got = [made.grow(0, 2_000) for made in (first, second)]  # 32 MiB
        grown = [a + b for a, b in zip(grown, got, strict=True)]
        if got == [0, 0]:
            break
        assert turn < 100
    assert min(grown) * 4 * SIZE > 200 * MIB
    first.close()
    assert second.grow(0, 2_000) == 2_000
    second.close()
    del held


@on_gpu
@pytest.mark.usefixtures("no_leak")
def test_a_pool_without_a_close_gives_memory_back_with_its_last_tensor() -> None:
    before = free_bytes()
    made = gpu_pool(20_000, 600, device="cuda")
    made.grow(0, 20_000)
    keys = made.keys[0]
    del made
    gc.collect()
    keys[19_999] = 1.0
    assert (keys[19_999] == 1.0).all()
    del keys
    gc.collect()
    assert before - free_bytes() <= 8 * MIB


@on_gpu
@pytest.mark.usefixtures("no_leak")
def test_where_memory_cannot_be_mapped_the_pool_is_allocated_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(device: str) -> CudaDriver:
        raise DeviceMemoryError("no virtual memory management")

    monkeypatch.setattr(pool_module, "CudaDriver", refuse)
    made = gpu_pool(600, 10, device="cuda")
    assert made.pool_bytes == 600 * 4 * SIZE + 10 * 2 * SIZE
    assert made.grow(0, 700) == 600
    made.keys[0][599] = 1.0
    torch.cuda.synchronize()
    made.close()


def write_and_attend(
    made: KvPool, tables: Tensor, qkv: Tensor, heads: int, out: Tensor, scratch: Any
) -> None:
    """One row of one sequence: K and V go to position 3 of its table, and it attends to 0 to 3."""
    from asyncllm.kernels.cuda import attention, rows

    device = tables.device
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    positions = torch.full((1,), 3, dtype=torch.int32, device=device)
    q = torch.zeros(1, heads, WIDTH, dtype=torch.float16, device=device)
    cos, sin = torch.ones(8, WIDTH // 2, device=device), torch.zeros(8, WIDTH // 2, device=device)
    keys, values = made.keys[0], made.values[0]
    rows.heads(
        qkv, q, keys, values, tables, None, slots, positions, cos, sin,
        scale=0.2, interleaved=False,
    )  # fmt: skip
    attention.decode(q, keys, values, tables, None, slots, positions, scratch, out=out)


@on_gpu
@pytest.mark.usefixtures("no_leak")
def test_a_graph_captured_before_growth_reaches_blocks_that_came_later() -> None:
    from asyncllm.kernels.cuda import attention

    made = gpu_pool(20_000, 10, device="cuda")
    assert made.grow(0, 4) == 4
    heads = 4
    tables = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    qkv = torch.randn(1, (heads + 2 * HEADS) * WIDTH, device="cuda")
    out = torch.zeros(1, heads, WIDTH, device="cuda")
    scratch = attention.DecodeScratch.of(1, heads, HEADS, WIDTH, 2, "cuda")
    past = torch.randn(3, HEADS, WIDTH, device="cuda").bfloat16()

    def fill(block: int) -> None:
        made.keys[0][block] = made.values[0][block] = torch.nan
        made.keys[0][block, :3] = past
        made.values[0][block, :3] = past.flip(0)

    fill(1)
    tables.fill_(1)
    write_and_attend(made, tables, qkv, heads, out, scratch)  # compiles
    torch.cuda.synchronize()
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_and_attend(made, tables, qkv, heads, out, scratch)
    assert made.grow(0, 15_000) == 15_000
    for block in (15_003, 1, 600):
        fill(block)
        tables.fill_(block)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)
        assert made.keys[0][block, 3].isfinite().all()
    made.close()
    del graph


@on_gpu
@pytest.mark.usefixtures("no_leak")
def test_blocks_beyond_two_to_the_31_elements_are_reached() -> None:
    from asyncllm.kernels.cuda import attention, rows

    kv_heads, width, heads, tokens = 8, 128, 16, 16
    each = tokens * kv_heads * width
    capacity = (1 << 31) // each + 200
    if free_bytes() < 4 * capacity * each + (1 << 30):
        pytest.skip("needs 9.6 GB of the device")
    group = LayerGroup(None, (0,), 4 * each, capacity)
    made = KvPool(
        [group], block_tokens=tokens, kv_heads=kv_heads, head_dim=width, dtype=torch.float16,
        device="cuda",
    )  # fmt: skip
    assert made.grow(0, capacity) == capacity
    assert made.keys[0].numel() > 1 << 31
    length = 70
    count = -(-length // tokens)
    high = list(range(capacity - 1, capacity - 1 - count, -1))
    assert min(high) * each > 1 << 31
    results = []
    for blocks in (list(range(3, 3 + count)), high):
        torch.manual_seed(5)
        for part in (made.keys[0], made.values[0]):
            for block in blocks:
                part[block] = torch.nan
        tables = torch.tensor([blocks], dtype=torch.int32, device="cuda")
        qkv = torch.randn(length, (heads + 2 * kv_heads) * width, device="cuda")
        slots = torch.zeros(length, dtype=torch.int32, device="cuda")
        positions = torch.arange(length, dtype=torch.int32, device="cuda")
        q = torch.zeros(length, heads, width, dtype=torch.float16, device="cuda")
        angles = torch.rand(length, width // 2, device="cuda")
        rows.heads(
            qkv, q, made.keys[0], made.values[0], tables, None, slots, positions,
            angles.cos(), angles.sin(), scale=0.1, interleaved=False,
        )  # fmt: skip
        chunk = torch.tensor([[0, length, 0, 0]], dtype=torch.int32, device="cuda")
        whole = torch.full((length, heads, width), torch.nan, device="cuda")
        attention.prefill(q, made.keys[0], made.values[0], tables, None, chunk, length, out=whole)
        one = torch.full((1, heads, width), torch.nan, device="cuda")
        attention.decode(
            q[-1:], made.keys[0], made.values[0], tables, None, slots[-1:], positions[-1:],
            attention.DecodeScratch.of(1, heads, kv_heads, width, 2, "cuda"), out=one,
        )  # fmt: skip
        results.append((whole, one))
    assert results[0][0].isfinite().all()
    torch.testing.assert_close(results[0][0][-1:], results[0][1], rtol=0.0, atol=4e-3)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    made.copy(0, high[0], 0)
    assert torch.equal(made.keys[0][0], made.keys[0][high[0]])
    made.close()


@on_gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_engines_share_a_device_and_give_their_memory_back(tmp_path: Path, kv_dtype: str) -> None:
    path = tmp_path / "tiny.gguf"
    synthetic.write("tiny-q4_k_m", path)

    async def run() -> list[tuple[int, ...]]:
        async with (
            AsyncEngine.load(path, device="cuda", kv_dtype=kv_dtype) as first,
            AsyncEngine.load(path, device="cuda", kv_dtype=kv_dtype) as second,
        ):
            outputs = []
            for engine in (first, second):
                before = engine.stats()
                done = await engine.generate(list(range(10, 60)), max_tokens=40, ignore_eos=True)
                outputs.append(tuple(done.token_ids))
                after = engine.stats()
                assert 0 < before.kv_pool_bytes <= after.kv_pool_bytes
                assert after.kv_pool_growths > before.kv_pool_growths
            return outputs

    # What the first engines of a process compile and load stays; so it is measured after them.
    asyncio.run(run())
    gc.collect()
    before = free_bytes()
    outputs = asyncio.run(run())
    assert outputs[0] == outputs[1]
    gc.collect()
    assert before - free_bytes() < 300 * MIB
