"""Where everything lies in a block store's file, and what its records look like.

A superblock and its copy, a page that names the holder, for each layer group a table of headers,
the recency stamps, and for each layer group a region of extents of one size. All numbers are
little-endian. A header tells what its extent holds and has the checksum of the bytes; nothing else
in the file says so, so nothing can disagree with it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

MAGIC: Final = b"\x89KVBLKS\n"
VERSION: Final = 1
PAGE: Final = 4096
HOLDER_OFFSET: Final = 2 * PAGE
TABLES_OFFSET: Final = 3 * PAGE
STAMP_BYTES: Final = 8
MOST_GROUPS: Final = 256
NAME_BYTES: Final = 128

_SUPERBLOCK: Final = struct.Struct(f"<8sIIIQ16s{NAME_BYTES}s")
_HEADER: Final = struct.Struct("<II16s16sQQ")
_SUM: Final = struct.Struct("<Q")
_MASK: Final = (1 << 64) - 1


class NotAStore(ValueError):
    """The bytes are not a superblock.

    Attributes:
        foreign: whether the file is something else altogether, rather than a store that was
            damaged or is of a later version.
    """

    def __init__(self, message: str, *, foreign: bool = False) -> None:
        super().__init__(message)
        self.foreign = foreign


@dataclass(frozen=True, slots=True)
class Layout:
    """A store's measures; fixed for the life of a file.

    Attributes:
        block_tokens: tokens in a block.
        extent_bytes: for each layer group the bytes of one block's K and V.
        extents: how many extents each group has.
    """

    block_tokens: int
    extent_bytes: tuple[int, ...]
    extents: int

    @classmethod
    def within(cls, limit_bytes: int, block_tokens: int, extent_bytes: Sequence[int]) -> Layout:
        """The largest layout whose file has at most `limit_bytes`; it may have no extents."""
        sizes = tuple(extent_bytes)
        for_each = sum(sizes) + len(sizes) * (cls(block_tokens, sizes, 0).header_bytes + 8)
        extents = max(0, (limit_bytes - TABLES_OFFSET) // for_each)
        while extents and cls(block_tokens, sizes, extents).file_bytes > limit_bytes:
            extents -= 1  # extents begin at a page
        return cls(block_tokens, sizes, extents)

    @property
    def header_bytes(self) -> int:
        return _HEADER.size + 4 * self.block_tokens + _SUM.size

    @property
    def table_bytes(self) -> int:
        """Bytes of one group's headers."""
        return self.extents * self.header_bytes

    @property
    def stamps_offset(self) -> int:
        return TABLES_OFFSET + len(self.extent_bytes) * self.table_bytes

    @property
    def stamps_bytes(self) -> int:
        """Bytes of all groups' stamps."""
        return len(self.extent_bytes) * self.extents * STAMP_BYTES

    @property
    def file_bytes(self) -> int:
        return self.extent_offset(len(self.extent_bytes), 0)

    def table_offset(self, group: int) -> int:
        return TABLES_OFFSET + group * self.table_bytes

    def header_offset(self, group: int, extent: int) -> int:
        return self.table_offset(group) + extent * self.header_bytes

    def extent_offset(self, group: int, extent: int) -> int:
        """Where an extent begins; of the group after the last: the file's end."""
        first = -(-(self.stamps_offset + self.stamps_bytes) // PAGE) * PAGE
        before = sum(size * self.extents for size in self.extent_bytes[:group])
        size = self.extent_bytes[group] if extent else 0
        return first + before + extent * size


@dataclass(frozen=True, slots=True)
class Superblock:
    """Whose store it is.

    Attributes:
        fingerprint: 16 bytes, of the model and everything that changes what K/V means.
        name: of the model, for people.
        layout: the measures.
    """

    fingerprint: bytes
    name: str
    layout: Layout

    def pack(self) -> bytes:
        """One page."""
        layout = self.layout
        name = self.name.encode("utf-8", "replace")[:NAME_BYTES]
        head = _SUPERBLOCK.pack(
            *(MAGIC, VERSION, layout.block_tokens, len(layout.extent_bytes), layout.extents),
            *(self.fingerprint, name),
        )
        body = head + struct.pack(f"<{len(layout.extent_bytes)}Q", *layout.extent_bytes)
        return (body + _SUM.pack(xxh3_64_intdigest(body))).ljust(PAGE, b"\0")

    @classmethod
    def parse(cls, page: bytes) -> Superblock:
        """Read one page.

        Raises:
            NotAStore: saying what it is instead.
        """
        if page[: len(MAGIC)] != MAGIC:
            raise NotAStore("it has no superblock")
        if len(page) < PAGE:
            raise NotAStore("its superblock is cut short")
        _, version, tokens, groups, extents, fingerprint, name = _SUPERBLOCK.unpack_from(page)
        if version != VERSION:
            raise NotAStore(f"it has version {version}; version {VERSION} is known here")
        end = _SUPERBLOCK.size + 8 * groups
        if groups > MOST_GROUPS or _SUM.unpack_from(page, end)[0] != xxh3_64_intdigest(page[:end]):
            raise NotAStore("its superblock is damaged")
        sizes = struct.unpack_from(f"<{groups}Q", page, _SUPERBLOCK.size)
        text = name.rstrip(b"\0").decode("utf-8", "replace")
        return cls(fingerprint, text, Layout(tokens, sizes, extents))

    @classmethod
    def find(cls, pages: bytes) -> Superblock:
        """Read the superblock or, where it is damaged, its copy in the page after it.

        Raises:
            NotAStore: saying what is wrong with the first.
        """
        try:
            return cls.parse(pages[:PAGE])
        except NotAStore as error:
            try:
                return cls.parse(pages[PAGE : 2 * PAGE])
            except NotAStore:
                ours = any(pages[at : at + len(MAGIC)] == MAGIC for at in (0, PAGE))
                raise NotAStore(str(error), foreign=any(pages) and not ours) from None


class Header(NamedTuple):
    """What an extent holds.

    Attributes:
        key: 16 bytes, of the prefix that ends with the block.
        parent: 16 bytes, key of the prefix one block shorter.
        tokens: the block's ids as packed 32-bit integers.
        length: bytes of K and V.
        checksum: XXH3-64 of those.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    length: int
    checksum: int

    def pack(self, seed: int) -> bytes:
        """Its bytes at one place of one store, see `header_seed`."""
        count = len(self.tokens) // 4
        head = _HEADER.pack(VERSION, count, self.key, self.parent, self.length, self.checksum)
        body = head + self.tokens
        return body + _SUM.pack(xxh3_64_intdigest(body, seed))

    @classmethod
    def parse(cls, data: bytes, seed: int) -> Header | None:
        """Read one; `None` if it is not one that was written to this place of this store."""
        end = len(data) - _SUM.size
        if _SUM.unpack_from(data, end)[0] != xxh3_64_intdigest(data[:end], seed):
            return None
        version, count, key, parent, length, checksum = _HEADER.unpack_from(data)
        tokens = data[_HEADER.size : end]
        if version != VERSION or len(tokens) != 4 * count:
            return None
        return cls(key, parent, tokens, length, checksum)  # a tuple: 100,000 are made at open


def header_seed(fingerprint: bytes, group: int, extent: int) -> int:
    """What a header's checksum starts from, so that one is only believed in its own place."""
    return (int.from_bytes(fingerprint[:8], "little") + (group << 48) + extent) & _MASK
