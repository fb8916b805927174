"""A block store's file: opened by one writer, read and written whole piece by whole piece."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Final, Literal

from asyncllm.errors import StoreError
from asyncllm.kv.store_layout import HOLDER_OFFSET, PAGE, Layout, NotAStore, Superblock

try:
    import fcntl
except ImportError:  # Windows, which has no preadv either
    fcntl = None  # type: ignore[assignment]

Mode = Literal["rw", "ro"]

# What a path that cannot serve at all raises; other errors are faults of the disk.
_WRONG_PATH: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class FileLayer:
    """The system calls that a store makes; tests put one that fails in its place.

    Every method raises `OSError` as the system does.
    """

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, fd: int) -> None:
        """Lock the whole file for this opener, or raise `BlockingIOError`."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def resize(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def is_at(self, fd: int, path: Path) -> bool:
        """Whether the path still leads to the open file."""
        return os.path.samestat(os.fstat(fd), os.stat(path))

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read up to the buffer's bytes; 0 at the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwritev(fd, [data], offset)


class StoreFile:
    """An open file.

    Args:
        path: where it is; made if it is not there and the mode is `"rw"`.
        mode: `"rw"` locks it against every other writer.
        layer: system calls.

    Raises:
        StoreError: the path cannot be a store's, or another opener holds it, whom it names.
        OSError: the disk has a fault.
    """

    def __init__(self, path: Path, mode: Mode, layer: FileLayer | None = None) -> None:
        if fcntl is None:
            raise StoreError("a block store needs a system with flock and preadv")
        self.path, self.mode = path, mode
        self._layer = layer or FileLayer()
        flags = os.O_RDWR | os.O_CREAT if mode == "rw" else os.O_RDONLY
        try:
            self._fd = self._layer.open(path, flags | getattr(os, "O_CLOEXEC", 0))
        except _WRONG_PATH as error:
            raise StoreError(f"{path}: no block store can be opened there: {error}") from error
        self._open = True
        try:
            if mode == "rw":
                self._lock()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            self._layer.lock(self._fd)
        except BlockingIOError:
            page = bytearray(PAGE)
            self.read(page, HOLDER_OFFSET)
            holder = bytes(page).split(b"\0", 1)[0].decode("utf-8", "replace") or "another process"
            raise StoreError(
                f"{self.path}: the block store is held by {holder}; "
                'give each process its own file, or open it with kv_store_mode="ro"'
            ) from None

    def superblock(self) -> Superblock | None:
        """Whose store it is; `None` if the file is empty.

        Raises:
            NotAStore: it is none, or none that can be read.
            OSError: the disk has a fault.
        """
        pages = bytearray(2 * PAGE)
        found = self.read(pages, 0)
        if found == 0:
            return None
        return Superblock.find(bytes(pages[:found]))

    def create(self, superblock: Superblock) -> None:
        """Make it an empty store, whatever it was."""
        page = superblock.pack()
        self._layer.resize(self._fd, 0)
        self.write(page + page, 0)
        self._layer.resize(self._fd, superblock.layout.file_bytes)

    def sign(self) -> None:
        """Write down who holds it."""
        holder = f"process {os.getpid()} on {socket.gethostname()}".encode()
        self.write(holder[: PAGE - 1].ljust(PAGE, b"\0"), HOLDER_OFFSET)

    def clear(self, layout: Layout) -> None:
        """Forget every block: a file without headers holds nothing."""
        self._layer.resize(self._fd, layout.table_offset(0))
        self._layer.resize(self._fd, layout.file_bytes)

    def is_in_place(self) -> bool:
        """Whether its path still leads to it: nobody deleted or replaced it."""
        try:
            return self._layer.is_at(self._fd, self.path)
        except FileNotFoundError:
            return False

    def read(self, buffer: bytearray | memoryview, offset: int) -> int:
        """Fill the buffer; fewer bytes are there only where the file ends."""
        view, done = memoryview(buffer), 0
        while done < len(view):
            count = self._layer.read(self._fd, view[done:], offset + done)
            if count == 0:
                break
            done += count
        return done

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of it.

        Raises:
            OSError: what of it was written is not known.
        """
        view, done = memoryview(data), 0
        while done < len(view):
            count = self._layer.write(self._fd, view[done:], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            done += count

    def read_table(self, layout: Layout, group: int) -> bytes:
        """A group's headers; zeros where the file ends before."""
        table = bytearray(layout.table_bytes)
        self.read(table, layout.table_offset(group))
        return bytes(table)

    def read_stamps(self, layout: Layout) -> bytes:
        """All groups' stamps; zeros where the file ends before."""
        stamps = bytearray(layout.stamps_bytes)
        self.read(stamps, layout.stamps_offset)
        return bytes(stamps)

    def close(self) -> None:
        """Let go of it and of the lock. Idempotent."""
        if self._open:
            self._open = False
            self._layer.close(self._fd)


def open_file(
    path: Path,
    wanted: Superblock,
    *,
    mode: Mode,
    reset: bool,
    layer: FileLayer | None = None,
) -> tuple[StoreFile, Superblock]:
    """Open a model's store, making or replacing it where that is asked for.

    A store of the same model and another size is begun anew.

    Args:
        path: of the file.
        wanted: whose store it has to be, and its measures.
        mode: how to open it; `"ro"` takes the file's own measures.
        reset: replace another model's store, or a damaged one.
        layer: system calls.

    Raises:
        StoreError: the file is another model's, no store at all, held, or not there.
        NotAStore: it is a store, but damaged or of a later version.
        OSError: the disk has a fault.
    """
    file = StoreFile(path, mode, layer)
    try:
        found: Superblock | None = None
        try:
            found = file.superblock()
        except NotAStore as error:
            if error.foreign:
                raise StoreError(
                    f"{path}: this is no block store; it is left as it is: choose another path"
                ) from error
            if not reset or mode == "ro":
                raise
        if found is not None and found.fingerprint != wanted.fingerprint:
            if not reset or mode == "ro":
                raise StoreError(
                    f"{path}: this block store was made for {found.name!r} "
                    f"({found.fingerprint.hex()}), this model or its settings are {wanted.name!r} "
                    f"({wanted.fingerprint.hex()}): choose another path, or replace it with "
                    "kv_store_reset=True"
                )
            found = None
        if mode == "ro":
            if found is None:
                raise StoreError(f'{path}: the file is empty; kv_store_mode="ro" only reads')
            return file, found
        if found is None or found.layout != wanted.layout:
            file.create(wanted)
        file.sign()
        return file, wanted
    except BaseException:
        file.close()
        raise
