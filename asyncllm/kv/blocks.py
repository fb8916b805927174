"""The host side of the K/V cache: block tables of sequences, what they share, what they reuse.

No K/V is here, only the accounts. A model's layer groups each have a `BlockPool`; `KvCache` ties
them together and serves whole sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from asyncllm.kv.block_pool import Below, BlockPool, InvariantError, Room
from asyncllm.kv.prefix import Chain, Prefix, PrefixIndex

if TYPE_CHECKING:
    from asyncllm.scheduler.step import LayerGroup

Copy = tuple[int, int, int]
"""A whole block to be copied before the next rows run: (group, source, target)."""


def _nothing(group: int, prefix: Prefix) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks whose K/V a sequence may use instead of computing it.

    Attributes:
        tokens: leading tokens of the sequence that they cover.
        first: for each group the number of the first block in `blocks`, counted in blocks from
            the sequence's start.
        blocks: for each group the blocks; the last one is partly used if `tokens` ends inside it.
            `None` stands for one that is only stored: it gets a block of its own, to be filled.
        forked: whether they are a sibling's rather than found by prefix.
        shortened: why it is no longer, in words; empty if it is as long as it may be.
    """

    tokens: int
    first: tuple[int, ...]
    blocks: tuple[tuple[int | None, ...], ...]
    forked: bool = False
    shortened: str = ""

    def stored(self) -> list[tuple[int, int]]:
        """Group and number of each block that is only stored."""
        return [
            (group, number)
            for group, (first, blocks) in enumerate(zip(self.first, self.blocks, strict=True))
            for number, block in enumerate(blocks, first)
            if block is None
        ]


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """What one running sequence holds, for each group.

    Attributes:
        tables: block ids; block number i lies in entry i, for a windowed group i modulo the ring.
            Entries of a ring whose block left the window, or was never held, name some block that
            must not be looked at.
        first: number of the oldest block held.
        last: number after the newest block held.
        quota: blocks reserved (windowed groups).
        published: leading full blocks whose prefixes were published, or came from a match.
    """

    tables: list[list[int]]
    first: list[int]
    last: list[int]
    quota: list[int]
    published: int
    _frozen: tuple[tuple[int, ...], ...] | None = field(default=None)

    def snapshot(self) -> tuple[tuple[int, ...], ...]:
        """The tables as they are now; the same object while nothing changes."""
        if self._frozen is None:
            self._frozen = tuple(map(tuple, self.tables))
        return self._frozen

    def entry(self, group: int, ring: int | None, number: int) -> int:
        return self.tables[group][number if ring is None else number % ring]

    def put(self, group: int, ring: int | None, number: int, block: int) -> None:
        table = self.tables[group]
        entry = number if ring is None else number % ring
        if entry == len(table):
            table.append(block)
        else:
            table[entry] = block
        self._frozen = None


class KvCache:
    """Block tables of all running sequences, and what can be reused of those that ended.

    Args:
        groups: layer groups, each with its pool's capacity.
        block_tokens: tokens in one block.
        max_chunk: tokens one row of a step has at most; with the window it makes a ring's size.
        grow: asks for (group, blocks) more; returns how many were granted. Called only when the
            caller said that no step is outstanding.
        fingerprint: of the model and of everything that changes what K/V means.
        prefix_cache: whether any sequence may use what others computed.
        below: a slower tier, told of blocks that become cached, and of those that are evicted.

    Attributes:
        prefix_hit_tokens: tokens that were reused instead of computed, by prefix.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        block_tokens: int,
        max_chunk: int,
        grow: Callable[[int, int], int],
        fingerprint: bytes,
        prefix_cache: bool,
        below: Below | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self.prefix_hit_tokens = 0
        self.windows = tuple(group.window for group in groups)
        self.rings = tuple(
            None if window is None else self.blocks_for(window - 1 + max_chunk) + 1
            for window in self.windows
        )
        self.pools = tuple(
            BlockPool(group.capacity, partial(grow, index), index, below)
            for index, group in enumerate(groups)
        )
        self._index = PrefixIndex(fingerprint, block_tokens)

    @property
    def blocks_total(self) -> int:
        return sum(pool.total for pool in self.pools)

    @property
    def blocks_used(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def blocks_cached(self) -> int:
        return sum(pool.cached for pool in self.pools)

    @property
    def blocks_free(self) -> int:
        return sum(pool.free for pool in self.pools)

    def counts(self) -> tuple[int, ...]:
        """Blocks in all, used, cached and free, and growths, summed over the groups."""
        return tuple(map(sum, zip(*(pool.counts() for pool in self.pools), strict=True)))

    @property
    def version(self) -> int:
        """Changes whenever an admission that was refused might now succeed."""
        return sum(pool.version for pool in self.pools)

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens whose K/V one sequence can ever hold; `None`: the pools set no bound."""
        bounds = [
            pool.capacity * self.block_tokens
            for pool, ring in zip(self.pools, self.rings, strict=True)
            if ring is None or pool.capacity < ring
        ]
        return min(bounds, default=None)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-tokens // self.block_tokens)

    def chain(self, salt: bytes) -> Chain:
        """An empty chain for a sequence under a salt."""
        return Chain(self._index, salt)

    def no_match(self, reason: str = "") -> Match:
        """Nothing to reuse."""
        groups = len(self.pools)
        return Match(0, (0,) * groups, ((),) * groups, shortened=reason)

    def match(
        self, chain: Chain, most: int, stored: Callable[[int, Prefix], bool] = _nothing
    ) -> Match:
        """The longest reusable prefix, of at most `most` tokens, as whole blocks.

        An unwindowed group must have all its blocks, a windowed one those that the query after
        the prefix sees. Recomputing only a window would not do: a state depends on the tokens of
        as many windows before it as there are windowed layers.

        Args:
            chain: prefixes of the sequence.
            most: tokens.
            stored: whether a slower tier has the block of a group that ends a prefix.
        """
        wanted = longest = min(len(chain), most // self.block_tokens)
        runs: list[list[int]] = []  # for each windowed group: blocks present up to each length
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            there = (
                pool.find(chain[i]) is not None or stored(group, chain[i]) for i in range(longest)
            )
            if window is None:
                longest = next((i for i, found in enumerate(there) if not found), longest)
            else:
                run = [0]
                for found in there:
                    run.append(run[-1] + 1 if found else 0)
                runs.append(run)
        windowed = [window for window in self.windows if window is not None]
        length = next(
            length
            for length in range(longest, -1, -1)
            if all(
                run[length] >= length - self._first_seen(window, length * self.block_tokens)
                for run, window in zip(runs, windowed, strict=True)
            )
        )
        first = tuple(
            min(length, self._first_seen(window, length * self.block_tokens))
            for window in self.windows
        )
        blocks = tuple(
            tuple(pool.find(chain[i]) for i in range(start, length))
            for pool, start in zip(self.pools, first, strict=True)
        )
        shortened = ""
        if length < longest:
            shortened = (
                f"blocks within a window before token {longest * self.block_tokens} are gone"
            )
        elif longest < wanted:
            shortened = f"the block at token {longest * self.block_tokens} is not there"
        return Match(length * self.block_tokens, first, blocks, shortened=shortened)

    def match_sibling(self, source: SequenceBlocks, tokens: int) -> Match | None:
        """The first `tokens` tokens of a running sequence; `None` if it holds them no more."""
        last = self.blocks_for(tokens)
        first = tuple(min(last, self._first_seen(window, tokens)) for window in self.windows)
        held = zip(first, source.first, source.last, strict=True)
        if any(start < oldest or last > newest for start, oldest, newest in held):
            return None
        blocks = tuple(
            tuple(source.entry(group, ring, i) for i in range(first[group], last))
            for group, ring in enumerate(self.rings)
        )
        return Match(tokens, first, blocks, forked=True)

    def admit(
        self, match: Match, tokens: int, life: int, may_grow: bool, copies: list[Copy]
    ) -> SequenceBlocks | Room:
        """Blocks for a sequence to start with, if there is room for them.

        Unwindowed groups: those of the match and of all its tokens, with one more left available
        as headroom where its life goes on past them. Windowed groups: the ring is reserved, or as
        many blocks as its whole life takes.

        Args:
            match: what it need not compute.
            tokens: tokens it has now.
            life: tokens whose K/V it will hold at most, at least `tokens`.
            may_grow: whether no step is outstanding, so that pools may grow and blocks be copied.
            copies: gets the copies to run before the sequence's first row.
        """
        shares_part = match.tokens % self.block_tokens != 0
        needed = self.blocks_for(tokens)
        headroom = int(self.blocks_for(life) > needed)
        found = [[block for block in held if block is not None] for held in match.blocks]
        asks = [
            needed - start - len(held) + shares_part + headroom
            for start, held in zip(match.first, found, strict=True)
        ]
        quotas = [0 if ring is None else min(ring, self.blocks_for(life)) for ring in self.rings]
        for pool, ring, ask, held, quota in zip(
            self.pools, self.rings, asks, found, quotas, strict=True
        ):
            if ring is not None:
                enough = pool.reserved + quota <= pool.total + pool.growable
            else:
                enough = ask + sum(not pool.is_held(b) for b in held) <= pool.available()
            if not enough:
                return Room.NONE
        if match.forked and not may_grow:
            return Room.AFTER_COLLECT
        # Held first, so that what makes room for the others does not evict them.
        for pool, held in zip(self.pools, found, strict=True):
            for block in held:
                pool.hold(block)
        reserved = [0] * len(self.pools)
        for group, pool in enumerate(self.pools):
            if self.rings[group] is None:
                room = pool.supply(asks[group], may_grow)
            else:
                room = pool.reserve(quotas[group], may_grow)
                reserved[group] = quotas[group] if room is Room.READY else 0
            if room is not Room.READY:
                for pool, held, quota in zip(self.pools, found, reserved, strict=True):
                    for block in reversed(held):
                        pool.release(block)
                    pool.unreserve(quota)
                return room
        blocks = self._adopt(match, reserved)
        for group, ring in enumerate(self.rings):
            if ring is None:
                self._append(blocks, group, needed)
        if shares_part and self.extend(blocks, match.tokens, 1, may_grow, copies) is not Room.READY:
            raise InvariantError("blocks counted at admission are not there")
        return blocks

    def extend(
        self,
        blocks: SequenceBlocks,
        offset: int,
        count: int,
        may_grow: bool,
        copies: list[Copy],
    ) -> Room:
        """Make positions `offset` to `offset + count - 1` writable; may be repeated.

        Blocks that no query from `offset` on sees are released first. A block that is shared or
        can be found by its prefix is replaced by a copy. Nothing is taken unless `READY`.
        """
        start, stop = offset // self.block_tokens, self.blocks_for(offset + count)
        to_copy: list[tuple[int, int]] = []
        grows = False
        for group, pool in enumerate(self.pools):
            window, ring, last = self.windows[group], self.rings[group], blocks.last[group]
            if window is not None:
                self._release_before(blocks, group, self._first_seen(window, offset))
            new = max(0, stop - last)
            for number in range(start, min(stop, last)):
                if not pool.is_writable(blocks.entry(group, ring, number)):
                    if not may_grow:
                        return Room.AFTER_COLLECT
                    to_copy.append((group, number))
                    new += 1
            if new:
                grows = True
                room = pool.supply(new, may_grow)
                if room is not Room.READY:
                    return room
        if grows:
            for group, number in to_copy:
                self._copy(blocks, group, number, copies)
            for group in range(len(self.pools)):
                self._append(blocks, group, stop)
        return Room.READY

    def publish(
        self,
        blocks: SequenceBlocks,
        chain: Chain,
        tokens: Callable[[int, int], Sequence[int]],
        computed: int,
    ) -> None:
        """Let others find the full blocks among the first `computed` tokens."""
        full = computed // self.block_tokens
        if full <= blocks.published:
            return
        chain.reach(tokens, full)
        for group, pool in enumerate(self.pools):
            oldest = max(blocks.published, blocks.first[group])
            for number in range(oldest, min(full, len(chain), blocks.last[group])):
                pool.publish(blocks.entry(group, self.rings[group], number), chain[number])
        blocks.published = full

    def release(self, blocks: SequenceBlocks) -> None:
        """Give back everything the sequence holds; done again it does nothing."""
        for group, pool in enumerate(self.pools):
            # The end of a prefix is of no use without its beginning: it grows cold first.
            for number in range(blocks.last[group] - 1, blocks.first[group] - 1, -1):
                pool.release(blocks.entry(group, self.rings[group], number))
            blocks.first[group] = blocks.last[group]
            pool.unreserve(blocks.quota[group])
            blocks.quota[group] = 0

    def retry_growth(self) -> bool:
        """Ask again where growth was refused before; whether there was such a refusal."""
        return any([pool.retry_growth() for pool in self.pools])

    def check(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Compare all accounts with what the running sequences hold.

        Raises:
            InvariantError: saying what differs.
        """
        running = list(sequences)
        for group, (pool, ring) in enumerate(zip(self.pools, self.rings, strict=True)):
            holders: Counter[int] = Counter()
            for blocks in running:
                numbers = range(blocks.first[group], blocks.last[group])
                if ring is not None and len(numbers) > blocks.quota[group]:
                    raise InvariantError(f"{len(numbers)} blocks held of {blocks.quota[group]}")
                holders.update(blocks.entry(group, ring, number) for number in numbers)
            pool.check(holders)
            if pool.reserved != sum(blocks.quota[group] for blocks in running):
                raise InvariantError(f"group {group} reserves {pool.reserved} blocks for no one")

    def _first_seen(self, window: int | None, position: int) -> int:
        """Number of the first block that a query at the position sees."""
        return 0 if window is None else max(0, position - window + 1) // self.block_tokens

    def _adopt(self, match: Match, quota: list[int]) -> SequenceBlocks:
        """Tables of a match's blocks, which are held already, and new ones where it has none."""
        tables: list[list[int]] = []
        last = [start + len(held) for start, held in zip(match.first, match.blocks, strict=True)]
        held = [
            [pool.take() if block is None else block for block in blocks]
            for pool, blocks in zip(self.pools, match.blocks, strict=True)
        ]
        for group, ring in enumerate(self.rings):
            size = last[group] if ring is None else min(ring, last[group])
            tables.append([held[group][0] if held[group] else 0] * size)
        blocks = SequenceBlocks(
            tables, list(match.first), last, quota, match.tokens // self.block_tokens
        )
        for group, ring in enumerate(self.rings):
            for number, block in enumerate(held[group], match.first[group]):
                blocks.put(group, ring, number, block)
        return blocks

    def _append(self, blocks: SequenceBlocks, group: int, last: int) -> None:
        while blocks.last[group] < last:
            block = self.pools[group].take()
            blocks.put(group, self.rings[group], blocks.last[group], block)
            blocks.last[group] += 1

    def _copy(self, blocks: SequenceBlocks, group: int, number: int, copies: list[Copy]) -> None:
        pool, ring = self.pools[group], self.rings[group]
        source = blocks.entry(group, ring, number)
        target = pool.take()
        blocks.put(group, ring, number, target)
        pool.release(source)
        copies.append((group, source, target))

    def _release_before(self, blocks: SequenceBlocks, group: int, number: int) -> None:
        # Newest first, as in `release`: what is nearer to the prefix's end is colder.
        stop = min(number, blocks.last[group])
        for old in range(stop - 1, blocks.first[group] - 1, -1):
            self.pools[group].release(blocks.entry(group, self.rings[group], old))
        blocks.first[group] = max(blocks.first[group], stop)
