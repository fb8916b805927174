"""What a block store holds of one layer group: blocks by key, and from the coldest on."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from operator import attrgetter

from sortedcontainers import SortedDict

from asyncllm.kv.store_layout import Header, Layout, header_seed


@dataclass(slots=True, eq=False)
class Stored:
    """A block in the file.

    Attributes:
        extent: where.
        header: what.
        stamp: when it was last of use; larger is later.
    """

    extent: int
    header: Header
    stamp: int


class ExtentIndex:
    """Two ordered indexes of a group's extents: key to block, recency stamp to key.

    Args:
        extents: how many there are.

    Attributes:
        stamps: of each extent, as the file keeps them; 0 where nothing is.
    """

    def __init__(self, extents: int) -> None:
        self._by_key: SortedDict[bytes, Stored] = SortedDict()
        self._by_stamp: SortedDict[int, bytes] = SortedDict()
        self._free = list(range(extents - 1, -1, -1))
        self._clock = 0
        self.stamps = array("Q", bytes(8 * extents))

    @classmethod
    def from_file(
        cls, layout: Layout, group: int, table: bytes, stamps: bytes, fingerprint: bytes
    ) -> ExtentIndex:
        """Rebuild it from what a file says.

        Args:
            layout: of the file.
            group: whose.
            table: the group's headers.
            stamps: the group's stamps; what they say is believed only as an order.
            fingerprint: of the store.
        """
        size, empty = layout.header_bytes, bytes(layout.header_bytes)
        order = array("Q", stamps)
        blocks: dict[bytes, Stored] = {}
        for extent in range(layout.extents):
            data = table[extent * size : (extent + 1) * size]
            if data == empty:
                continue
            header = Header.parse(data, header_seed(fingerprint, group, extent))
            if header is not None and header.length == layout.extent_bytes[group]:
                blocks.setdefault(header.key, Stored(extent, header, order[extent]))
        index = cls(0)
        index.stamps = array("Q", bytes(8 * layout.extents))
        by_age = sorted(blocks.values(), key=attrgetter("stamp"))
        for age, stored in enumerate(by_age, start=1):
            stored.stamp = index.stamps[stored.extent] = age
        index._by_key = SortedDict(blocks)
        index._by_stamp = SortedDict({stored.stamp: stored.header.key for stored in by_age})
        index._clock = len(blocks)
        index._free = [e for e in range(layout.extents - 1, -1, -1) if index.stamps[e] == 0]
        return index

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: bytes) -> Stored | None:
        stored: Stored | None = self._by_key.get(key)
        return stored

    def blocks(self) -> list[Stored]:
        """All of them, by key."""
        return list(self._by_key.values())

    def add(self, extent: int, header: Header) -> None:
        """The extent, which `take` gave, now holds a block that was not there."""
        self._clock += 1
        self._by_key[header.key] = Stored(extent, header, self._clock)
        self._by_stamp[self._clock] = header.key
        self.stamps[extent] = self._clock

    def touch(self, key: bytes) -> None:
        """A block was of use, if it is there."""
        stored = self._by_key.get(key)
        if stored is not None:
            self._clock += 1
            del self._by_stamp[stored.stamp]
            stored.stamp = self._clock
            self._by_stamp[self._clock] = key
            self.stamps[stored.extent] = self._clock

    def remove(self, key: bytes) -> Stored:
        """Forget a block; its extent is the caller's now: to be `give`n back."""
        stored: Stored = self._by_key.pop(key)
        del self._by_stamp[stored.stamp]
        self.stamps[stored.extent] = 0
        return stored

    def take(self) -> int | None:
        """An extent to write to, that of the coldest block if none is free; `None`: none at all."""
        if self._free:
            return self._free.pop()
        if not self._by_stamp:
            return None
        return self.remove(self._by_stamp.peekitem(0)[1]).extent

    def give(self, extent: int) -> None:
        """An extent that holds nothing."""
        self._free.append(extent)
