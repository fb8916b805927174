"""What a person may ask of a block store's file, without the model: what is in it, is it whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from asyncllm.errors import StoreError
from asyncllm.kv.store import read_indexes
from asyncllm.kv.store_file import Mode, StoreFile
from asyncllm.kv.store_layout import NotAStore, Superblock
from asyncllm.kv.store_thread import ReadJob, perform


@dataclass(frozen=True, slots=True)
class GroupContent:
    """What a store has of one layer group.

    Attributes:
        blocks: how many.
        extents: how many it may have.
        extent_bytes: bytes of each.
    """

    blocks: int
    extents: int
    extent_bytes: int


@dataclass(frozen=True, slots=True)
class StoreContent:
    """What a store's file has.

    Attributes:
        name: of the model.
        fingerprint: 32 hexadecimal digits, of the model and its settings.
        block_tokens: tokens in a block.
        file_bytes: what the file may take.
        groups: layer groups.
    """

    name: str
    fingerprint: str
    block_tokens: int
    file_bytes: int
    groups: tuple[GroupContent, ...]


@contextmanager
def _opened(path: Path, mode: Mode) -> Iterator[tuple[StoreFile, Superblock]]:
    """The file; whatever is wrong with it is a `StoreError`."""
    try:
        if not path.exists():
            raise StoreError(f"{path}: there is no such file")
        file = StoreFile(path, mode)
        try:
            superblock = file.superblock()
            if superblock is None:
                raise StoreError(f"{path}: the file is empty")
            yield file, superblock
        finally:
            file.close()
    except NotAStore as error:
        raise StoreError(f"{path}: this is no block store that can be read: {error}") from error
    except OSError as error:
        raise StoreError(f"{path}: the block store cannot be read: {error}") from error


def content(path: Path) -> StoreContent:
    """What is in a store, as its headers say; it may be in use.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    with _opened(path, "ro") as (file, superblock):
        layout = superblock.layout
        return StoreContent(
            superblock.name,
            superblock.fingerprint.hex(),
            layout.block_tokens,
            layout.file_bytes,
            tuple(
                GroupContent(len(index), layout.extents, size)
                for index, size in zip(
                    read_indexes(file, superblock), layout.extent_bytes, strict=True
                )
            ),
        )


def verify(path: Path) -> tuple[int, int]:
    """Read every block of a store; how many are whole, and how many are not.

    Where a writer is at work, what it replaces meanwhile counts as not whole.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    with _opened(path, "ro") as (file, superblock):
        layout, counts = superblock.layout, [0, 0]
        slot = memoryview(bytearray(max(layout.extent_bytes)))
        for group, index in enumerate(read_indexes(file, superblock)):
            for stored in index.blocks():
                job = ReadJob(group, stored.extent, stored.header, 0, None)
                with suppress(OSError):  # of this block: not whole
                    perform(job, file, layout, superblock.fingerprint, [slot])
                counts[not job.good] += 1
        return counts[0], counts[1]


def clear(path: Path) -> None:
    """Make a store empty; it stays its model's.

    Raises:
        StoreError: there is none, it cannot be read, or it is in use.
    """
    with _opened(path, "rw") as (file, superblock):
        file.clear(superblock.layout)
