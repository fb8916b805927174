"""`KvPool`: the memory behind the block numbers, and how much of it a model and a machine allow."""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from asyncllm import telemetry
from asyncllm.errors import ModelLoadError, OptionsError
from asyncllm.kv.device_memory import CudaDriver, DeviceMemoryError, GrowingBuffers
from asyncllm.kv.staging import Staging
from asyncllm.scheduler.step import LayerGroup, StepPlan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncllm.model.config import ModelConfig

# Share of the memory that is free at load which "auto" lets the pool take, as far as it needs it.
AUTO_SHARE = 0.5

# Never granted to the pool: what the rest of the process may need meanwhile.
RESERVE_BYTES = 256 << 20

_ROOT = Path("/")


class KvPool:
    """For each layer one K and one V buffer, `[blocks, block_tokens, kv_heads, head_dim]`.

    On the CPU a buffer is a private anonymous map of the group's whole capacity. The system gives
    it memory where it is first written, so the pool takes what is used and nothing ever moves. The
    block after the last, `null_block`, takes the writes of rows that only pad a step.

    On a GPU a buffer has the addresses of the whole capacity and memory for what is granted, in
    pieces of some MiB; see `GrowingBuffers`. What is not granted must not be touched, and what is
    has no content before it is written. There is no null block: kernels write nothing of rows that
    only pad. Where the device has no virtual memory management buffers are allocated whole.

    K and V of int8 have a scale for each head of each token.

    Args:
        groups: layers that share block numbers, with their capacities.
        block_tokens: tokens in a block.
        kv_heads: heads of K and of V.
        head_dim: width of a head.
        dtype: type that K and V are kept in.
        device: where it is.

    Attributes:
        groups: as given.
        keys: for each layer its K.
        values: for each layer its V.
        scales: for each layer those of K and of V, float32 `[blocks, kv_heads, block_tokens]`, a
            block's scales of all layers side by side; empty unless the type is int8.
        granted: for each group the blocks that may be used.
        growths: how often blocks were granted.
        staging: where blocks are put for a block store, if there is one; see `stage`.

    Raises:
        ModelLoadError: the device has not even memory for one block of each layer.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self._device = device
        self.groups = tuple(groups)
        self.block_tokens = block_tokens
        self.granted = [0] * len(self.groups)
        self.growths = 0
        self.staging: Staging | None = None
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.scales: dict[int, tuple[Tensor, Tensor]] = {}
        # For each group what has memory mapped to it, with the bytes of a block there.
        self._growing: list[list[tuple[GrowingBuffers, int]]] = [[] for _ in self.groups]
        self._driver = None if device == "cpu" else _driver(device)
        try:
            for index, group in enumerate(self.groups):
                self._allocate(index, group, (block_tokens, kv_heads, head_dim), dtype)
        except BaseException:
            self.close()
            raise

    def _allocate(
        self, index: int, group: LayerGroup, block: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        import torch

        count = 2 * len(group.layers)
        if dtype == torch.int8:
            # First, also when they grow: they are small, and K and V without them of no use.
            tokens, heads, _ = block
            (scales,) = self._buffers(index, 1, (count, heads, tokens), torch.float32)
            for place, layer in enumerate(group.layers):
                self.scales[layer] = scales[:, 2 * place], scales[:, 2 * place + 1]
        buffers = self._buffers(index, count, block, dtype)
        self.keys |= zip(group.layers, buffers[::2], strict=True)
        self.values |= zip(group.layers, buffers[1::2], strict=True)

    def _buffers(
        self, index: int, count: int, block: tuple[int, ...], dtype: torch.dtype
    ) -> list[Tensor]:
        """Buffers for a group's blocks, each a block's shape for every block."""
        blocks = self.groups[index].capacity + (self._device == "cpu")  # there with the null block
        shape = (blocks, *block)
        driver, block_bytes = self._driver, math.prod(block) * dtype.itemsize
        if driver is None:
            return [_allocated(shape, dtype, self._device) for _ in range(count)]
        growing = GrowingBuffers(driver, count, blocks * block_bytes)
        self._growing[index].append((growing, block_bytes))
        # What has memory torch can take for a tensor; and warm-up steps use block 0.
        growing.extend(block_bytes, 0)
        if growing.mapped_bytes < block_bytes:
            raise ModelLoadError(
                f"{self._device} has {driver.free_bytes()} bytes free: too few for {count} K/V "
                f"buffers that start with {driver.piece_bytes} bytes each"
            )
        return [growing.tensor(number).view(dtype).view(shape) for number in range(count)]

    @property
    def pool_bytes(self) -> int:
        """Bytes taken: on the CPU those of the blocks granted so far."""
        if self._driver is not None:
            return sum(growing.taken_bytes for group in self._growing for growing, _ in group)
        whole = [group.capacity for group in self.groups]
        blocks = self.granted if self._device == "cpu" else whole
        return sum(n * group.block_bytes for n, group in zip(blocks, self.groups, strict=True))

    def null_block(self, group: int) -> int:
        """Number of the group's block for padding rows, on the CPU."""
        return self.groups[group].capacity

    def grow(self, group: int, blocks: int) -> int:
        """Grant up to `blocks` more blocks of a group, the next numbers; returns how many."""
        room = self.groups[group].capacity - self.granted[group]
        asked = max(0, min(blocks, room))
        granted = min(asked, self._obtainable(group, asked)) if asked else 0
        self.granted[group] += granted
        self.growths += granted > 0
        return granted

    def _obtainable(self, group: int, blocks: int) -> int:
        """For how many more blocks there is memory, once so many were asked for."""
        if self._device == "cpu":  # where memory is only taken when it is written
            return max(0, available_bytes() - RESERVE_BYTES) // self.groups[group].block_bytes
        if self._driver is None:
            return blocks
        wanted = self.granted[group] + blocks
        for growing, size in self._growing[group]:
            growing.extend(wanted * size, RESERVE_BYTES)
        there = min(growing.mapped_bytes // size for growing, size in self._growing[group])
        return there - self.granted[group]

    def stage(self, slots: int) -> Staging:
        """Make room for so many blocks on their way to or from a block store."""
        self.staging = Staging(self, slots)
        return self.staging

    def prepare(self, plan: StepPlan) -> None:
        """Do a step's block operations, which come before its rows."""
        if self.staging is not None and plan.saves:
            self.staging.save(plan.saves)
        for copy in plan.copies:
            self.copy(copy.group, copy.source, copy.target)
        if self.staging is not None and plan.loads:
            self.staging.load(plan.loads)

    def copy(self, group: int, source: int, target: int) -> None:
        """Copy a block in all layers of its group."""
        for layer in self.groups[group].layers:
            self.keys[layer][target] = self.keys[layer][source]
            self.values[layer][target] = self.values[layer][source]
            for scales in self.scales.get(layer, ()):
                scales[target] = scales[source]

    def close(self) -> None:
        """Let go of the memory, on a GPU when that is idle. Idempotent."""
        self.staging = None
        self.keys.clear()
        self.values.clear()
        self.scales.clear()
        for group in self._growing:
            for growing, _ in group:
                growing.close()


def _driver(device: str) -> CudaDriver | None:
    """What can map memory on a device; `None`: nothing can."""
    try:
        return CudaDriver(device)
    except (DeviceMemoryError, OSError) as error:
        telemetry.record("kv-pool-whole", level=logging.WARNING, device=device, error=str(error))
        return None


def _allocated(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if device == "cpu":
        return _mapped(shape, dtype)
    import torch

    return torch.zeros(shape, dtype=dtype, device=device)


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory before they are written."""
    import torch

    nbytes = math.prod(shape) * dtype.itemsize
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, nbytes, flags=flags)
    else:
        memory = mmap.mmap(-1, nbytes)
    # The tensor holds the map, which goes when the tensor does.
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def ring_blocks(window: int, chunk: int, block_tokens: int) -> int:
    """Blocks of a windowed sequence's ring: the window of a chunk's first query, and the chunk."""
    return -(-(window - 1 + chunk) // block_tokens) + 1


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one head of K or V takes for a token, with its scale if it has one."""
    import torch

    return head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == torch.int8 else 0)


def layer_groups(
    config: ModelConfig,
    *,
    block_tokens: int,
    chunk: int,
    max_seqs: int,
    context_length: int,
    kv_bytes: int | Literal["auto"],
    dtype: torch.dtype,
    available: int | None = None,
) -> tuple[LayerGroup, ...]:
    """Which layers share block numbers, and how many blocks each group may hold.

    The unwindowed layers are one group and each window size is one. In full, the pool holds
    `max_seqs` sequences of `context_length` tokens, and each windowed group twice as many rings
    (cached blocks need room too). Where the budget is smaller, one ring a windowed group comes
    first and the rest is shared out in proportion.

    Args:
        config: of the model.
        block_tokens: tokens in a block.
        chunk: tokens a step may advance one sequence at most.
        max_seqs: sequences that run at once.
        context_length: tokens a sequence may have.
        kv_bytes: bytes of all groups at most; `"auto"`: a share of what is free now.
        dtype: type that K and V are kept in.
        available: bytes of memory that are free for `"auto"`; `None`: the process's own.

    Raises:
        OptionsError: the budget holds not even one short sequence; the message has the numbers.
    """
    windows: dict[int | None, list[int]] = {}
    for index, layer in enumerate(config.layers):
        windows.setdefault(layer.window, []).append(index)
    token_bytes = 2 * config.kv_heads * head_bytes(config.head_dim, dtype)
    sequence_blocks = -(-context_length // block_tokens)
    groups: list[LayerGroup] = []
    least: list[int] = []  # blocks without which no sequence can run
    for window in sorted(windows, key=lambda size: (size is not None, size or 0)):
        if window is None:
            least.append(min(sequence_blocks, 2))  # one and the headroom of admission
            full = max_seqs * sequence_blocks
        else:
            ring = min(ring_blocks(window, chunk, block_tokens), sequence_blocks)
            least.append(ring)
            full = 2 * max_seqs * ring
        layers = tuple(windows[window])
        groups.append(LayerGroup(window, layers, len(layers) * block_tokens * token_bytes, full))

    wanted = sum(group.capacity * group.block_bytes for group in groups)
    needed = sum(blocks * group.block_bytes for blocks, group in zip(least, groups, strict=True))
    if kv_bytes == "auto":
        available = available_bytes() if available is None else available
        budget = max(0, int(AUTO_SHARE * (available - RESERVE_BYTES)))
        given = f'kv_bytes="auto" gives {budget} bytes ({available} are free)'
    else:
        budget, given = kv_bytes, f"kv_bytes={kv_bytes}"
    if budget >= wanted:
        return tuple(groups)
    if budget < needed:
        raise OptionsError(
            f"{given}, but one short sequence needs {needed} bytes "
            f"({' and '.join(_described(*each) for each in zip(least, groups, strict=True))}); "
            f"{wanted} hold max_seqs={max_seqs} of context_length={context_length}"
        )
    share = (budget - needed) / (wanted - needed)
    return tuple(
        replace(group, capacity=blocks + int(share * (group.capacity - blocks)))
        for blocks, group in zip(least, groups, strict=True)
    )


def _described(blocks: int, group: LayerGroup) -> str:
    kind = "no window" if group.window is None else f"window {group.window}"
    return f"{blocks} blocks of {group.block_bytes} bytes for {len(group.layers)} layers of {kind}"


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory this process could still take, control groups' limits respected.

    Args:
        root: where `proc` and `sys` are; for tests.
    """
    bounds = [
        int(line.split()[1]) * 1024
        for line in _lines(root / "proc/meminfo")
        if line.startswith("MemAvailable:")
    ]
    if not bounds and hasattr(os, "sysconf"):
        bounds.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        base = root / "sys/fs/cgroup"
        limit, usage, idle = "memory.max", "memory.current", "inactive_file"
        if controllers:  # version 1
            if "memory" not in controllers.split(","):
                continue
            base = base / "memory"
            limit, usage, idle = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        place = base / path.lstrip("/")
        for directory in (place, *place.parents):
            bound = _first_number(directory / limit)
            used = _first_number(directory / usage)
            if bound is not None and used is not None:
                # Files' pages that nobody uses are given back before the limit bites.
                spare = sum(
                    int(line.split()[1])
                    for line in _lines(directory / "memory.stat")
                    if line.startswith(f"{idle} ")
                )
                bounds.append(max(0, bound - used + spare))
            if directory == base:
                break
    return min(bounds, default=4 << 30)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _first_number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None
