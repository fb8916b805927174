"""The threads that read and write a block store's file.

They touch the file and the staging slots that jobs name, nothing else. Reads go before writes: no
job reads what a waiting one will write, since a block is only known once it was written. One thread
writes, in order; others may help it to read. A read that meets the writing of what its extent is to
hold next does not verify, and nobody asks for that block any more.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """

    group: int
    extent: int
    header: Header
    slot: int
    owner: Any
    good: bool = False
    fault: Exception | None = None


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


class StoreThreads:
    """They do jobs and hand them back.

    Args:
        file: read and written by these threads alone from now on; closed by them at their end.
        layout: of the file.
        fingerprint: of the store.
        slots: staging memory, each large enough for a block of any group.
        readers: threads that read, the one that writes among them.

    Attributes:
        done: jobs that ended, as they did; the engine thread takes them out.
        wake: called on a thread whenever a job has ended.
    """

    def __init__(
        self,
        file: StoreFile,
        layout: Layout,
        fingerprint: bytes,
        slots: Sequence[memoryview],
        readers: int = 1,
    ) -> None:
        self.done: deque[Job] = deque()
        self.wake: Callable[[], object] = lambda: None
        self._file, self._layout, self._fingerprint = file, layout, fingerprint
        self._slots = slots
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._ready = threading.Condition()
        self._closing = False
        # Daemons: a disk that never answers must not keep a process from ending. They hold no
        # lock and call nothing but the system while they wait.
        self._helpers = [self._begin(self._read, number) for number in range(1, readers)]
        self._thread = self._begin(self._run, 0)

    def _begin(self, work: Callable[[], None], number: int) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"asyncllm-store-{number}", daemon=True)
        thread.start()
        return thread

    def put(self, job: Job) -> None:
        """Queue a job; never waits for the disk."""
        with self._ready:
            (self._reads if isinstance(job, ReadJob) else self._writes).append(job)
            self._ready.notify_all()

    def close(self, patience_s: float) -> None:
        """Do what is queued, close the file and end; whatever the disk does, return in time."""
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        self._thread.join(patience_s)

    def _run(self) -> None:
        try:
            while (job := self._next(self._reads, self._writes)) is not None:
                self._do(job)
        finally:
            for helper in self._helpers:
                helper.join()  # a file that is closed under a read is another file's number
            self._file.close()

    def _read(self) -> None:
        while (job := self._next(self._reads)) is not None:
            self._do(job)

    def _do(self, job: Job) -> None:
        try:
            perform(job, self._file, self._layout, self._fingerprint, self._slots)
        except Exception as error:  # a fault of the disk is told, whatever it looks like
            job.fault = error
        self.done.append(job)
        self.wake()

    def _next(self, *queues: deque[Job]) -> Job | None:
        """The next job of the first queue that has one; `None` at the end."""
        with self._ready:
            while not (any(queues) or self._closing):
                self._ready.wait()
            return next((queue.popleft() for queue in queues if queue), None)


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
        whole = file.read(data, place) == len(data)
        job.good = whole and xxh3_64_intdigest(data) == job.header.checksum
        return
    job.header = job.header._replace(checksum=xxh3_64_intdigest(data))
    seed = header_seed(fingerprint, job.group, job.extent)
    file.write(data, place)
    file.write(job.header.pack(seed), layout.header_offset(job.group, job.extent))
