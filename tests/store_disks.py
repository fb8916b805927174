"""Disks for the block store's tests: one in memory, and one that fails where it is told to."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

from asyncllm.engine import AsyncEngine
from asyncllm.kv.prefix import Chain, PrefixIndex
from asyncllm.kv.store import BlockStore
from asyncllm.kv.store_file import FileLayer, Mode
from asyncllm.kv.store_layout import PAGE, Layout, Superblock

BLOCK_TOKENS = 4
FINGERPRINT = b"a model's print."


class MemoryDisk(FileLayer):
    """One file in memory."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)

    def open(self, path: Path, flags: int) -> int:
        return -1

    def close(self, fd: int) -> None:
        pass

    def lock(self, fd: int) -> None:
        pass

    def resize(self, fd: int, size: int) -> None:
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))

    def is_at(self, fd: int, path: Path) -> bool:
        return True

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        data = self.content[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        end = offset + len(data)
        if len(self.content) < end:
            self.resize(fd, end)
        self.content[offset:end] = data
        return len(data)


class FaultyDisk(FileLayer):
    """The system's calls, until it is told to fail.

    Attributes:
        failing: for each operation (`"open"`, `"read"`, `"write"` and so on) what it raises.
        spare: how many more calls of a failing operation work.
        short: bytes that one read or write moves at most.
        gate: what reads and writes wait for: a disk that does not answer while it is not set.
        calls: reads, writes and closings, as they were let through.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, OSError] = {}
        self.spare = 0
        self.short: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def _meet(self, operation: str) -> None:
        if operation in ("read", "write"):
            self.gate.wait()
            self.calls.append(operation)
        error = self.failing.get(operation)
        if error is not None:
            if self.spare == 0:
                raise error
            self.spare -= 1

    def open(self, path: Path, flags: int) -> int:
        self._meet("open")
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        self.calls.append("close")
        super().close(fd)

    def lock(self, fd: int) -> None:
        self._meet("lock")
        super().lock(fd)

    def resize(self, fd: int, size: int) -> None:
        self._meet("resize")
        super().resize(fd, size)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._meet("read")
        return super().read(fd, buffer[: self.short], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._meet("write")
        return super().write(fd, data[: self.short], offset)


def chain_of(tokens: Sequence[int], salt: bytes = b"", block_tokens: int = BLOCK_TOKENS) -> Chain:
    chain = Chain(PrefixIndex(FINGERPRINT, block_tokens), salt)
    chain.reach(lambda start, stop: tokens[start:stop], len(tokens) // block_tokens)
    return chain


def content(group: int, number: int, size: int) -> bytes:
    """Bytes that only this block has."""
    return (b"%d/%d " % (group, number)).ljust(size, b"~")[:size]


class Store:
    """A block store with slots of its own, and blocks whose bytes are known."""

    def __init__(
        self,
        path: Path,
        *,
        extents: int = 8,
        sizes: Sequence[int] = (64,),
        slots: int = 8,
        layer: FileLayer | None = None,
        fingerprint: bytes = FINGERPRINT,
        mode: Mode = "rw",
        reset: bool = False,
        limit: int | None = None,
        readers: int = 1,
    ) -> None:
        self.sizes = tuple(sizes)
        layout = Layout(BLOCK_TOKENS, self.sizes, extents)
        self.slots = [memoryview(bytearray(max(sizes))) for _ in range(slots)]
        self.store = BlockStore(
            path,
            fingerprint=fingerprint,
            name="tiny",
            block_tokens=BLOCK_TOKENS,
            extent_bytes=self.sizes,
            readers=readers,
            limit_bytes=layout.file_bytes if limit is None else limit,
            slots=self.slots,
            mode=mode,
            reset=reset,
            layer=layer,
        )

    def save(self, chain: Chain, numbers: Sequence[int], group: int = 0) -> None:
        """Write some of a chain's blocks and wait until that is over."""
        for number in numbers:
            if not self.store.wants(group, chain[number]):
                continue
            transfer = self.store.begin_save(group, 0, chain[number])
            assert transfer is not None
            size = self.sizes[group]
            self.slots[transfer.slot][:size] = content(group, number, size)
            self.store.end_save(transfer, chain[number])
            self.settle()

    def settle(self) -> list[tuple[object, int | None]]:
        """Wait until the store's thread has nothing to do."""
        reads: list[tuple[object, int | None]] = []
        for _ in range(5000):
            reads += self.store.poll()
            if not self.store.busy:
                return reads
            os.sched_yield()
            threading.Event().wait(0.001)
        raise AssertionError("the store's thread never came to an end")

    def read(self, chain: Chain, number: int, group: int = 0) -> bytes | None:
        """A block's bytes; `None` if the store has not got it, or it turned out bad."""
        if not self.store.has(group, chain[number]):
            return None
        assert self.store.begin_read(group, chain[number], number)
        ((owner, slot),) = self.settle()
        assert owner == number
        if slot is None:
            return None
        data = bytes(self.slots[slot][: self.sizes[group]])
        self.store.free(slot)
        return data

    def close(self) -> None:
        self.store.close()


def spoil(path: Path, share: float, seed: int = 0) -> None:
    """Damage that share of a store's extents, most in their bytes and some in their headers."""
    rng = random.Random(seed)
    layout = Superblock.find(path.read_bytes()[: 2 * PAGE]).layout
    with path.open("r+b") as file:
        for group, size in enumerate(layout.extent_bytes):
            for extent in range(layout.extents):
                if rng.random() < share:
                    in_header = rng.random() < 0.2
                    start = (layout.header_offset if in_header else layout.extent_offset)(
                        group, extent
                    )
                    file.seek(start + rng.randrange(layout.header_bytes if in_header else size))
                    file.write(rng.randbytes(1))


async def written(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing more to store."""
    before = -1
    while before != engine.stats().store_written_blocks:
        before = engine.stats().store_written_blocks
        await asyncio.sleep(0.1)
