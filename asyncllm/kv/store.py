"""`BlockStore`: a prefix cache in a file, as the engine thread sees it.

It never waits for the disk: blocks leave through staging slots that a thread of its own writes
from, and come back through slots that it reads into. What cannot be read whole and verified is not
there.
"""

from __future__ import annotations

import errno
import logging
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from asyncllm import telemetry
from asyncllm.errors import OptionsError
from asyncllm.kv.prefix import Prefix
from asyncllm.kv.store_file import FileLayer, Mode, StoreFile, open_file
from asyncllm.kv.store_index import ExtentIndex
from asyncllm.kv.store_layout import Header, Layout, NotAStore, Superblock
from asyncllm.kv.store_thread import PatchJob, ReadJob, StoreThreads, WriteJob
from asyncllm.scheduler.step import BlockTransfer

# Staging memory, and how many slots there are at least and at most, whatever a block's size.
STAGING_BYTES: Final = 64 << 20
FEWEST_SLOTS: Final = 8
MOST_SLOTS: Final = 512

STAMPS_EVERY_S: Final = 1.0  # how old the file's recency stamps may get
CLOSE_PATIENCE_S: Final = 1.5  # for what is queued when the store is closed
MOST_FAULTS: Final = 3  # in a row, after which the store is given up

# After these nothing can be written any more, while reading may go on.
_UNWRITABLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENOENT})


def slots_for(extent_bytes: Sequence[int]) -> int:
    """Staging slots that a model's blocks should have."""
    return max(FEWEST_SLOTS, min(MOST_SLOTS, STAGING_BYTES // max(extent_bytes)))


class BlockStore:
    """Blocks of one model in one file.

    Args:
        path: of the file.
        fingerprint: 16 bytes, of the model and everything that changes what K/V means.
        name: of the model, for people.
        block_tokens: tokens in a block.
        extent_bytes: for each layer group the bytes of one block's K and V.
        limit_bytes: of the file.
        slots: staging memory, each large enough for a block of any group.
        mode: `"ro"` writes nothing.
        reset: replace another model's store, or a damaged one.
        readers: threads that read.
        layer: system calls.

    Attributes:
        hit_blocks: blocks read and verified since it was opened.
        written_blocks: blocks written.
        rejected_blocks: reads that did not verify.
        dropped_blocks: blocks that were not written: no slot was free, or the disk failed.
        faults: errors of the disk.

    Raises:
        OptionsError: not one block fits the limit.
        StoreError: the file is another model's, no store, held by someone, or cannot be there.
    """

    def __init__(
        self,
        path: Path,
        *,
        fingerprint: bytes,
        name: str,
        block_tokens: int,
        extent_bytes: Sequence[int],
        limit_bytes: int,
        slots: Sequence[memoryview],
        mode: Mode = "rw",
        reset: bool = False,
        readers: int = 1,
        layer: FileLayer | None = None,
    ) -> None:
        layout = Layout.within(limit_bytes, block_tokens, extent_bytes)
        if layout.extents == 0:
            least = Layout(block_tokens, tuple(extent_bytes), 1).file_bytes
            raise OptionsError(
                f"kv_store_bytes={limit_bytes}: one block takes {least} bytes with its tables"
            )
        self.path = path
        self._free_slots = list(range(len(slots)))
        self._for_writes = len(slots) // 2  # so that writing never keeps reads from having any
        self._writing: dict[tuple[int, bytes], None] = {}  # what is in a slot on its way out
        self._reading = 0
        self.hit_blocks = self.written_blocks = self.rejected_blocks = 0
        self.dropped_blocks = self.faults = 0
        self._faults_in_a_row = 0
        self._told: set[str] = set()
        self._stamped_at = perf_counter()
        self._stamps_changed = False
        self._readable, self._writable = False, False
        self._indexes: list[ExtentIndex] = []
        self._thread: StoreThreads | None = None
        try:
            file, superblock = open_file(
                path, Superblock(fingerprint, name, layout), mode=mode, reset=reset, layer=layer
            )
        except (NotAStore, OSError) as error:
            self._fault("open", error)
            return
        self._layout = superblock.layout
        try:
            self._indexes = read_indexes(file, superblock)
        except OSError as error:
            file.close()
            self._fault("open", error)
            return
        self._thread = StoreThreads(file, self._layout, fingerprint, slots, readers)
        self._readable, self._writable = True, mode == "rw"

    # What it has.

    @property
    def counts(self) -> dict[str, int]:
        """Its counters, as `EngineStats` names them."""
        return {
            "store_hit_blocks": self.hit_blocks,
            "store_written_blocks": self.written_blocks,
            "store_rejected_blocks": self.rejected_blocks,
            "store_dropped_blocks": self.dropped_blocks,
            "store_faults": self.faults,
        }

    @property
    def blocks(self) -> int:
        """Blocks that could be read now, all groups summed."""
        return sum(map(len, self._indexes)) if self._readable else 0

    @property
    def busy(self) -> bool:
        """Whether jobs are under way."""
        return self._readable and (bool(self._writing) or self._reading > 0)

    def has(self, group: int, prefix: Prefix) -> bool:
        """Whether it has the block that ends the prefix; its token ids are compared."""
        if not self._readable:
            return False
        stored = self._indexes[group].get(prefix.key)
        if stored is None:
            return False
        header = stored.header
        return header.tokens == prefix.tokens and header.parent == _parent(prefix)

    def touch(self, group: int, prefix: Prefix) -> None:
        """The block was of use: it is to be the last to go."""
        if self._writable:
            self._indexes[group].touch(prefix.key)
            self._stamps_changed = True

    # Out.

    def wants(self, group: int, prefix: Prefix) -> bool:
        """Whether it would keep the block."""
        key = prefix.key
        return (
            self._writable
            and (group, key) not in self._writing
            and self._indexes[group].get(key) is None
        )

    def begin_save(self, group: int, block: int, prefix: Prefix) -> BlockTransfer | None:
        """A slot for a block that it wants; `None` while all are taken."""
        if len(self._writing) >= self._for_writes or not self._free_slots:
            return None
        self._writing[group, prefix.key] = None
        return BlockTransfer(group, block, self._free_slots.pop())

    def end_save(self, transfer: BlockTransfer, prefix: Prefix) -> None:
        """The block is in its slot: write it."""
        group = transfer.group
        extent = self._indexes[group].take() if self._writable else None
        if extent is None or self._thread is None:
            self.dropped_blocks += 1
            self._let_go(group, prefix.key, transfer.slot)
            return
        length = self._layout.extent_bytes[group]
        header = Header(prefix.key, _parent(prefix), prefix.tokens, length, 0)
        self._thread.put(WriteJob(group, extent, header, transfer.slot))

    # In.

    def begin_read(self, group: int, prefix: Prefix, owner: object) -> bool:
        """Have a block brought into a slot, of which `poll` tells; `False`: not now.

        It must be there, see `has`.
        """
        if not self._free_slots or self._thread is None:
            return False
        stored = self._indexes[group].get(prefix.key)
        if stored is None:
            raise KeyError(prefix.key)
        self._reading += 1
        slot = self._free_slots.pop()
        self._thread.put(ReadJob(group, stored.extent, stored.header, slot, owner))
        return True

    def free(self, slot: int) -> None:
        """A slot that was read into is of no more use."""
        self._free_slots.append(slot)

    def poll(self) -> list[tuple[Any, int | None]]:
        """Take in what the thread has done.

        Returns:
            The owner of each read that ended with its slot, which is the caller's until it is
            freed, or `None` where the block turned out not to be there.
        """
        reads: list[tuple[Any, int | None]] = []
        thread = self._thread
        while thread is not None and thread.done:
            job = thread.done.popleft()
            if job.fault is None:
                self._faults_in_a_row = 0
            else:
                self._fault("read" if isinstance(job, ReadJob) else "write", job.fault)
            if isinstance(job, ReadJob):
                reads.append((job.owner, self._take_read(job)))
            elif isinstance(job, WriteJob):
                self._take_write(job)
        self._keep_stamps()
        return reads

    def on_progress(self, wake: Callable[[], object]) -> None:
        """Have a function called, on the store's thread, whenever there is something to poll."""
        if self._thread is not None:
            self._thread.wake = wake

    def give_up(self, error: Exception) -> None:
        """Count a fault after which nothing is read or written any more."""
        self._fault("disabled", error)
        self._readable = self._writable = False

    def close(self) -> None:
        """Write what is queued, in bounded time, and let go of the file. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            if self._stamps_changed and self._writable:
                thread.put(self._stamps())
            thread.close(CLOSE_PATIENCE_S)
        self._readable = self._writable = False

    # Inside.

    def _take_read(self, job: ReadJob) -> int | None:
        self._reading -= 1
        if job.good and self._readable:
            self.hit_blocks += 1
            return job.slot
        self.free(job.slot)
        index = self._indexes[job.group]
        stored = index.get(job.header.key)
        if stored is None or stored.header is not job.header:
            return None  # evicted meanwhile
        index.remove(job.header.key)
        if job.fault is None and not job.good:
            self.rejected_blocks += 1
            self._tell("verify", f"extent {job.extent} of group {job.group} is damaged")
            if self._writable and self._thread is not None:
                index.give(job.extent)
                place = self._layout.header_offset(job.group, job.extent)
                self._thread.put(PatchJob(bytes(self._layout.header_bytes), place))
        # Where the disk has a fault the extent is not used again before the file is opened anew.
        return None

    def _take_write(self, job: WriteJob) -> None:
        self._let_go(job.group, job.header.key, job.slot)
        index = self._indexes[job.group]
        if job.fault is not None:
            self.dropped_blocks += 1
            index.give(job.extent)
        else:
            self.written_blocks += 1
            index.add(job.extent, job.header)
            self._stamps_changed = True

    def _let_go(self, group: int, key: bytes, slot: int) -> None:
        del self._writing[group, key]
        self.free(slot)

    def _keep_stamps(self) -> None:
        now = perf_counter()
        if not self._stamps_changed or now - self._stamped_at < STAMPS_EVERY_S:
            return
        self._stamped_at, self._stamps_changed = now, False
        if self._thread is not None and self._writable:
            self._thread.put(self._stamps())

    def _stamps(self) -> PatchJob:
        data = b"".join(index.stamps.tobytes() for index in self._indexes)
        return PatchJob(data, self._layout.stamps_offset)

    def _fault(self, what: str, error: Exception) -> None:
        self.faults += 1
        self._faults_in_a_row += 1
        self._tell(what, repr(error))
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            self._writable = False
        elif self._faults_in_a_row >= MOST_FAULTS:
            self._readable = self._writable = False
            self._tell("disabled", f"{MOST_FAULTS} faults in a row")

    def _tell(self, what: str, error: str) -> None:
        """One record for each kind of fault, however often it comes."""
        if what not in self._told:
            self._told.add(what)
            telemetry.record(
                "store-fault", level=logging.WARNING, path=str(self.path), what=what, error=error
            )


def _parent(prefix: Prefix) -> bytes:
    """Key of the prefix one block shorter."""
    return b"" if prefix.parent is None else prefix.parent.key


def read_indexes(file: StoreFile, superblock: Superblock) -> list[ExtentIndex]:
    """What a file holds, by layer group."""
    layout = superblock.layout
    stamps = array("Q", file.read_stamps(layout))
    indexes = []
    for group in range(len(layout.extent_bytes)):
        own = stamps[group * layout.extents : (group + 1) * layout.extents]
        table = file.read_table(layout, group)
        indexes.append(
            ExtentIndex.from_file(layout, group, table, own.tobytes(), superblock.fingerprint)
        )
    return indexes
