"""Blocks of K/V by number: who holds them, which are kept for reuse, which are free."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from asyncllm.errors import AsyncLLMError
from asyncllm.kv.prefix import Prefix

FIRST_GROWTH_BLOCKS = 16


class InvariantError(AsyncLLMError, AssertionError):
    """The accounts of the cache or of the scheduler contradict themselves: a bug in here."""


class Room(Enum):
    """Whether blocks asked for are there."""

    READY = auto()
    AFTER_COLLECT = auto()  # the pool must grow or copy, which no outstanding step may see
    NONE = auto()


class Below(Protocol):
    """A slower tier of the cache, told of the blocks that have no holder but a prefix."""

    def cached(self, group: int, block: int, prefix: Prefix) -> None:
        """The block lost its last holder; its content stays until it is evicted."""

    def evicted(self, group: int, block: int, prefix: Prefix) -> None:
        """The block is about to be given new content."""


class BlockPool:
    """The blocks of one layer group: free, held (counted by reference), or cached.

    A cached block has no holder but a prefix; it is evicted, coldest first, when no block is free
    and the pool can grow no more.

    Args:
        capacity: blocks the pool may ever hold.
        grow: asks for this many more blocks; returns how many were granted.
        group: which layer group's they are.
        below: told of blocks that become cached, and of those that are evicted.

    Attributes:
        total: blocks that exist now.
        reserved: blocks promised to sequences of a windowed group, held or not.
        growths: how often it grew.
        version: changes whenever a block might have become available or a prefix findable.
    """

    def __init__(
        self,
        capacity: int,
        grow: Callable[[int], int],
        group: int = 0,
        below: Below | None = None,
    ) -> None:
        self.capacity = capacity
        self.total = 0
        self.reserved = 0
        self.growths = 0
        self.version = 0
        self._grow = grow
        self._group, self._below = group, below
        self._refused = False
        self._references: list[int] = []
        self._prefixes: list[Prefix | None] = []
        self._free: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[Prefix, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with a holder, each counted once."""
        return self.total - len(self._free) - len(self._cached)

    def counts(self) -> tuple[int, int, int, int, int]:
        """Blocks in all, used, cached and free, and growths."""
        return self.total, self.used, len(self._cached), len(self._free), self.growths

    @property
    def growable(self) -> int:
        """Blocks it may still grow by; none after a refusal, until `retry_growth`."""
        return 0 if self._refused else self.capacity - self.total

    def available(self) -> int:
        """Blocks that could be taken: free, cached and still growable."""
        return len(self._free) + len(self._cached) + self.growable

    def supply(self, blocks: int, may_grow: bool) -> Room:
        """Grow if that many cannot be taken from the free ones; say whether they are there."""
        short = blocks - len(self._free)
        if short > 0 and self.growable > 0:
            if not may_grow:
                return Room.AFTER_COLLECT
            self._enlarge(short)
            short = blocks - len(self._free)
        return Room.READY if short <= len(self._cached) else Room.NONE

    def reserve(self, blocks: int, may_grow: bool) -> Room:
        """Promise that many blocks; on `READY` they can always be taken until `unreserve`."""
        short = self.reserved + blocks - self.total
        if short > self.growable:
            return Room.NONE
        if short > 0:
            if not may_grow:
                return Room.AFTER_COLLECT
            self._enlarge(short)
            if self.reserved + blocks > self.total:
                return Room.NONE
        self.reserved += blocks
        return Room.READY

    def unreserve(self, blocks: int) -> None:
        self.reserved -= blocks
        self.version += 1

    def retry_growth(self) -> bool:
        """Forget that growth was refused; whether it was."""
        refused, self._refused = self._refused, False
        self.version += refused
        return refused

    def take(self) -> int:
        """A block for new content, with one holder; evicts the coldest if none is free.

        Raises:
            InvariantError: if `supply` was not asked before.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise InvariantError(f"no block to take: all {self.total} have holders")
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder for a held or cached block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder less; without any it is cached if it has a prefix, else free."""
        if self._references[block] <= 0:
            raise InvariantError(f"block {block} is released but has no holder")
        self._references[block] -= 1
        if self._references[block] == 0:
            self.version += 1
            prefix = self._prefixes[block]
            if prefix is None:
                self._free.append(block)
            else:
                self._cached[block] = None
                if self._below is not None:
                    self._below.cached(self._group, block, prefix)

    def publish(self, block: int, prefix: Prefix) -> None:
        """Let the held, full block be found by its prefix, unless another serves that already."""
        if self._prefixes[block] is None and prefix not in self._block_of:
            self._prefixes[block] = prefix
            self._block_of[prefix] = block
            self.version += 1

    def find(self, prefix: Prefix) -> int | None:
        """The block that holds the prefix's last tokens."""
        return self._block_of.get(prefix)

    def is_held(self, block: int) -> bool:
        return self._references[block] > 0

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may write it: nobody shares it, nobody can find it."""
        return self._references[block] == 1 and self._prefixes[block] is None

    def check(self, holders: Counter[int]) -> None:
        """Compare with the holders counted anew.

        Raises:
            InvariantError: saying what differs.
        """
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free) or free & cached:
            raise InvariantError("a block is free twice, or free and cached")
        if not len(self._references) == len(self._prefixes) == self.total <= self.capacity:
            raise InvariantError(f"{self.total} blocks exist of {self.capacity}, lists differ")
        for block, references in enumerate(self._references):
            if references != holders[block]:
                raise InvariantError(f"block {block} counts {references}, has {holders[block]}")
            if (references == 0) != (block in free or block in cached):
                raise InvariantError(f"block {block} with {references} holders is in the wrong set")
            prefix = self._prefixes[block]
            if (block in cached and prefix is None) or (block in free and prefix is not None):
                raise InvariantError(f"block {block} is in the wrong set for its prefix")
            if prefix is not None and self._block_of.get(prefix) != block:
                raise InvariantError(f"block {block} cannot be found by its prefix")
        if len(self._block_of) != sum(prefix is not None for prefix in self._prefixes):
            raise InvariantError("a prefix leads to a block that does not have it")
        if not 0 <= self.reserved <= self.total:
            raise InvariantError(f"{self.reserved} blocks reserved of {self.total}")

    def _enlarge(self, blocks: int) -> None:
        # Doubling keeps growths few; the first pieces stay small for those who need little.
        asked = min(max(blocks, self.total, FIRST_GROWTH_BLOCKS), self.growable)
        granted = self._grow(asked)
        if not 0 <= granted <= asked:
            raise InvariantError(f"{granted} blocks granted where {asked} were asked for")
        self._refused = granted < asked
        if granted:
            self.growths += 1
            self.version += 1
            self._free[:0] = range(self.total + granted - 1, self.total - 1, -1)
            self._references += [0] * granted
            self._prefixes += [None] * granted
            self.total += granted

    def _forget(self, block: int) -> None:
        prefix = self._prefixes[block]
        if prefix is not None:
            if self._below is not None:
                self._below.evicted(self._group, block, prefix)
            del self._block_of[prefix]
            self._prefixes[block] = None
            self.version += 1
