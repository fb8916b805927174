"""The thread that reads and writes a block store's file.

It touches the file and the staging slots that jobs name, nothing else. Reads go before writes: no
job reads what a waiting one will write, since a block is only known once it was written.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from xxhash import xxh3_64_intdigest

from asyncllm.kv.store_file import StoreFile
from asyncllm.kv.store_layout import Header, Layout, header_seed


@dataclass(slots=True, eq=False)
class ReadJob:
    """Bring a block into a slot.

    Attributes:
        group: its layer group.
        extent: where it is in the file.
        header: what it must be.
        slot: where its bytes go.
        owner: whoever asked; the thread does not look.
        good: whether the bytes are there, and those that the header means.
        fault: what the system said otherwise, if it did.
        seconds: what it took.
    """

    group: int
    extent: int
    header: Header
    slot: int
    owner: Any
    good: bool = False
    fault: Exception | None = None
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class WriteJob:
    """Write a block from a slot: its bytes first, its header last.

    Attributes:
        group: its layer group.
        extent: where it goes.
        header: what it is; its checksum is filled in by the thread.
        slot: where its bytes are.
        fault: what went wrong.
    """

    group: int
    extent: int
    header: Header
    slot: int
    fault: Exception | None = None


@dataclass(slots=True, eq=False)
class PatchJob:
    """Write some bytes that no block's content depends on: stamps, or zeros over a header."""

    data: bytes
    offset: int
    fault: Exception | None = None


Job = ReadJob | WriteJob | PatchJob


class StoreThread:
    """Does jobs and hands them back.

    Args:
        file: read and written by this thread alone from now on; closed by it at its end.
        layout: of the file.
        fingerprint: of the store.
        slots: staging memory, each large enough for a block of any group.

    Attributes:
        done: jobs that ended, in their order; the engine thread takes them out.
        wake: called on the thread whenever a job has ended.
    """

    def __init__(
        self, file: StoreFile, layout: Layout, fingerprint: bytes, slots: Sequence[memoryview]
    ) -> None:
        self.done: deque[Job] = deque()
        self.wake: Callable[[], object] = lambda: None
        self._file, self._layout, self._fingerprint = file, layout, fingerprint
        self._slots = slots
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._ready = threading.Condition()
        self._closing = False
        # A daemon: a disk that never answers must not keep a process from ending. It holds no
        # lock and calls nothing but the system while it waits.
        self._thread = threading.Thread(target=self._run, name="asyncllm-store", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; never waits for the disk."""
        with self._ready:
            (self._reads if isinstance(job, ReadJob) else self._writes).append(job)
            self._ready.notify()

    def close(self, patience_s: float) -> None:
        """Do what is queued, close the file and end; whatever the disk does, return in time."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join(patience_s)

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                try:
                    perform(job, self._file, self._layout, self._fingerprint, self._slots)
                except Exception as error:  # a fault of the disk is told, whatever it looks like
                    job.fault = error
                self.done.append(job)
                self.wake()
        finally:
            self._file.close()

    def _next(self) -> Job | None:
        with self._ready:
            while not (self._reads or self._writes or self._closing):
                self._ready.wait()
            if self._reads:
                return self._reads.popleft()
            return self._writes.popleft() if self._writes else None


def perform(
    job: Job,
    file: StoreFile,
    layout: Layout,
    fingerprint: bytes,
    slots: Sequence[memoryview],
) -> None:
    """Do a job and note in it what came of it.

    Raises:
        OSError: the disk has a fault, or the file is not where it was.
    """
    if isinstance(job, PatchJob):
        if not file.is_in_place():
            raise FileNotFoundError(errno.ENOENT, "the file was deleted or replaced", file.path)
        file.write(job.data, job.offset)
        return
    place = layout.extent_offset(job.group, job.extent)
    data = slots[job.slot][: job.header.length]
    if isinstance(job, ReadJob):
        started = perf_counter()
        whole = file.read(data, place) == len(data)
        job.good = whole and xxh3_64_intdigest(data) == job.header.checksum
        job.seconds = perf_counter() - started
        return
    job.header = job.header._replace(checksum=xxh3_64_intdigest(data))
    seed = header_seed(fingerprint, job.group, job.extent)
    file.write(data, place)
    file.write(job.header.pack(seed), layout.header_offset(job.group, job.extent))
