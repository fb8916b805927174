"""Blocks on their way between the K/V pool and the block store.

Out: a block that loses its last holder is of use to later processes too, and is saved when there is
time, the latest first: that is the beginning of a prefix, without which its end is of no use. One
that is evicted before its turn is saved at once, or dropped if no slot is free.

In: a sequence is `ADOPTING` while blocks of its prefix are read into slots and from there, at the
head of the next step, into its own blocks, where they can be found from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from asyncllm import telemetry
from asyncllm.kv.block_pool import InvariantError
from asyncllm.kv.blocks import KvCache, Match
from asyncllm.kv.prefix import Chain, Prefix
from asyncllm.kv.store import BlockStore
from asyncllm.scheduler.request import Sequence as Output
from asyncllm.scheduler.step import BlockTransfer, LayerGroup, StepPlan

# What is saved at the head of a step with rows: copying more would be felt.
SAVED_BYTES_A_STEP: Final = 8 << 20

# For how long sequences wait for a disk that gives no block.
PATIENCE_S: Final = 5.0

# What an earlier time of reading counts against the newest.
WEIGHT_OF_BEFORE: Final = 0.8

# Adoptions that computing was faster than, after which one is tried all the same: disks and what
# the system has of a file in memory change.
RETRY_AFTER: Final = 16


_Key = tuple[int, Prefix]
"""A layer group, and the prefix that a block of it ends."""


@dataclass(slots=True, eq=False)
class Adoption:
    """What a sequence waits for.

    Attributes:
        sequence: whose it is.
        match: what it reuses.
        missing: group and prefix of each block that is not in the pool yet.
        wanted: blocks to be read, not asked for yet.
        reading: blocks being read.
        failed: whether one of them was not there; the sequence is to be matched anew.
        abandoned: whether the sequence needs it no more.
    """

    sequence: Output
    match: Match
    missing: set[_Key] = field(default_factory=set)
    wanted: deque[_Fetch] = field(default_factory=deque)
    reading: int = 0
    failed: bool = False
    abandoned: bool = False

    @property
    def settled(self) -> bool:
        """Whether nothing more of it will arrive."""
        return self.reading == 0 and (self.failed or not self.wanted)


@dataclass(frozen=True, slots=True, eq=False)
class _Fetch:
    """A stored block and the block it is to fill."""

    adoption: Adoption
    group: int
    block: int
    prefix: Prefix


class Transfers:
    """What the scheduler has to do with a block store; it is the `Below` of the cache.

    Args:
        store: of this model.
        groups: layer groups, for the bytes of their blocks.
        prompt_rate: prompt tokens a second that steps were measured to compute, if any were.

    Attributes:
        bytes_per_s: what came in while any sequence adopted; `None` before the first.
    """

    def __init__(
        self,
        store: BlockStore,
        groups: Sequence[LayerGroup],
        prompt_rate: Callable[[], float | None],
    ) -> None:
        self.store = store
        self._block_bytes = [group.block_bytes for group in groups]
        self._prompt_rate = prompt_rate
        self._unsaved: dict[tuple[int, int], Prefix] = {}  # by group and block, oldest first
        self._saves: list[tuple[BlockTransfer, Prefix]] = []  # for the next plan
        self._saving: dict[BlockTransfer, Prefix] = {}  # of plans that are out
        self._loads: list[tuple[_Fetch, int]] = []  # for the next plan: a block from a slot
        self._adoptions: dict[int, Adoption] = {}  # by sequence id
        self._expected: dict[_Key, Adoption] = {}  # what is about to be in the pool
        self._moved_at = 0.0  # when a read last ended, or had nothing before it
        self._began = 0.0  # when the first of those that adopt now began to
        self._bytes = 0  # that arrived since
        self._measured = (0.0, 0.0)  # bytes, and seconds in which they came
        self.bytes_per_s: float | None = None
        self._refused = 0

    # What waits.

    @property
    def has_work(self) -> bool:
        """Whether anything is on its way, or waits for a slot or a plan."""
        return bool(self._unsaved or self._saves or self._loads) or self.store.busy

    # The tier below the pool.

    def cached(self, group: int, block: int, prefix: Prefix) -> None:
        """Save the block when there is time."""
        if self.store.wants(group, prefix):
            self._unsaved.pop((group, block), None)
            self._unsaved[group, block] = prefix

    def evicted(self, group: int, block: int, prefix: Prefix) -> None:
        """Save the block now or never."""
        self._unsaved.pop((group, block), None)
        if self.store.wants(group, prefix):
            transfer = self.store.begin_save(group, block, prefix)
            if transfer is None:
                self.store.dropped_blocks += 1
            else:
                self._saves.append((transfer, prefix))

    # Adopting.

    def match(self, cache: KvCache, chain: Chain, most: int) -> Match:
        """The longest prefix that is worth reusing, from the pool and from the store."""
        near = cache.match(chain, most)
        far = cache.match(chain, most, self.store.has)
        if far.tokens <= near.tokens:
            return near
        nbytes = sum(self._block_bytes[group] for group, _ in far.stored())
        if self._is_faster(nbytes, far.tokens - near.tokens):
            return far
        reason = f"computing {far.tokens - near.tokens} tokens is faster than reading them"
        return Match(near.tokens, near.first, near.blocks, shortened=reason)

    def _is_faster(self, nbytes: int, tokens: int) -> bool:
        reading, computing = self.bytes_per_s, self._prompt_rate()
        if reading is None or computing is None or nbytes / reading < tokens / computing:
            return True
        self._refused += 1
        return self._refused % RETRY_AFTER == 0

    def is_underway(self, match: Match, chain: Chain) -> bool:
        """Whether another sequence is adopting some of it: soon it will be in the pool."""
        return any((group, chain[number]) in self._expected for group, number in match.stored())

    def is_loading(self, sequence: Output) -> bool:
        """Whether the next plan puts something into the sequence's blocks."""
        return any(fetch.adoption.sequence is sequence for fetch, _ in self._loads)

    def reuse(self, match: Match, chain: Chain) -> None:
        """The match is used: what is stored of it stays longest, the beginning above all."""
        for group, (first, blocks) in enumerate(zip(match.first, match.blocks, strict=True)):
            for number in range(first + len(blocks) - 1, first - 1, -1):
                self.store.touch(group, chain[number])
        if telemetry.enabled():
            telemetry.record(
                "prefix-hit",
                tokens=match.tokens,
                stored_blocks=len(match.stored()),
                shortened=match.shortened,
            )

    def adopt(self, sequence: Output, match: Match, cache: KvCache) -> None:
        """Read what the sequence's match has only in the store; its blocks are there."""
        blocks, chain = sequence.blocks, sequence.chain
        if blocks is None or chain is None:
            raise InvariantError(f"sequence {sequence.sequence_id} adopts without blocks")
        adoption = Adoption(sequence, match)
        for group, number in match.stored():
            block = blocks.entry(group, cache.rings[group], number)
            adoption.wanted.append(_Fetch(adoption, group, block, chain[number]))
            adoption.missing.add((group, chain[number]))
            self._expected[group, chain[number]] = adoption
        if not self._adoptions:
            self._moved_at = self._began = perf_counter()
            self._bytes = 0
        self._adoptions[sequence.sequence_id] = adoption
        self._ask()

    def abandon(self, sequence: Output) -> None:
        """The sequence's blocks are no longer its own: nothing more may be put into them."""
        adoption = self._adoptions.pop(sequence.sequence_id, None)
        if adoption is not None:
            adoption.abandoned = True
            adoption.wanted.clear()
            for key in list(adoption.missing):
                self._arrived(adoption, key)
        # An adoption that is over may have left some to the next plan.
        loads, self._loads = self._loads, []
        for fetch, slot in loads:
            if fetch.adoption.sequence is sequence:
                self._arrived(fetch.adoption, (fetch.group, fetch.prefix))
                self.store.free(slot)
            else:
                self._loads.append((fetch, slot))

    def poll(self) -> list[Adoption]:
        """Take in what the store has done; the adoptions that are over, `failed` or not.

        What a good one still has to load is in the next plan, before that plan's rows.
        """
        now = perf_counter()
        for fetch, slot in self.store.poll():
            adoption: Adoption = fetch.adoption
            adoption.reading -= 1
            self._moved_at = now
            self._bytes += self._block_bytes[fetch.group]
            if slot is not None and not adoption.abandoned:
                self._loads.append((fetch, slot))
            elif slot is None:
                adoption.failed = True
            else:
                self.store.free(slot)
        self._ask()
        adoptions = list(self._adoptions.values())
        if now - self._moved_at > PATIENCE_S and not all(each.settled for each in adoptions):
            self.store.give_up(TimeoutError(f"the disk gave no block for {PATIENCE_S} s"))
            for adoption in adoptions:
                adoption.failed = True
            return adoptions
        over = [adoption for adoption in adoptions if adoption.settled]
        for adoption in over:
            if not adoption.failed:
                del self._adoptions[adoption.sequence.sequence_id]
        if over and not self._adoptions:
            self._measure(now - self._began)
        return over

    def _measure(self, seconds: float) -> None:
        """Learn from a time in which sequences adopted; the longest tell most."""
        nbytes, before = self._measured
        self._measured = (
            WEIGHT_OF_BEFORE * nbytes + self._bytes,
            WEIGHT_OF_BEFORE * before + seconds,
        )
        if self._measured[1] > 0:
            self.bytes_per_s = self._measured[0] / self._measured[1]

    def _ask(self) -> None:
        """Have read what slots are free for, for the oldest first."""
        for adoption in self._adoptions.values():
            while adoption.wanted and not adoption.failed:
                fetch = adoption.wanted[0]
                if not self.store.has(fetch.group, fetch.prefix):
                    adoption.failed = True  # evicted since
                elif not self.store.begin_read(fetch.group, fetch.prefix, fetch):
                    return
                else:
                    adoption.wanted.popleft()
                    adoption.reading += 1

    def _arrived(self, adoption: Adoption, key: _Key) -> None:
        """Nobody needs to wait any more for what an adoption brings."""
        adoption.missing.discard(key)
        if self._expected.get(key) is adoption:
            del self._expected[key]

    def check(self, adopting: set[int]) -> None:
        """Compare with the sequences that adopt.

        Raises:
            InvariantError: saying what differs.
        """
        if adopting != set(self._adoptions):
            raise InvariantError(f"{adopting} adopt, {set(self._adoptions)} are waited for")

    # In a plan.

    def prepare(self, with_rows: bool) -> bool:
        """Choose what the next plan saves; whether it has to move any blocks at all."""
        budget = SAVED_BYTES_A_STEP if with_rows else 1 << 62
        while self._unsaved and budget > 0:
            (group, block), prefix = next(reversed(self._unsaved.items()))
            if self.store.wants(group, prefix):
                transfer = self.store.begin_save(group, block, prefix)
                if transfer is None:
                    break
                self._saves.append((transfer, prefix))
                budget -= self._block_bytes[group]
            del self._unsaved[group, block]
        return bool(self._saves or self._loads)

    def next_saves(self) -> tuple[BlockTransfer, ...]:
        """What the next plan has to save before anything else."""
        saves = tuple(transfer for transfer, _ in self._saves)
        self._saving |= self._saves
        self._saves.clear()
        return saves

    def next_loads(self, cache: KvCache) -> tuple[BlockTransfer, ...]:
        """What the next plan has to load before its rows; others may share it from then on."""
        loads = []
        for fetch, slot in self._loads:
            cache.pools[fetch.group].publish(fetch.block, fetch.prefix)
            self._arrived(fetch.adoption, (fetch.group, fetch.prefix))
            loads.append(BlockTransfer(fetch.group, fetch.block, slot))
        self._loads.clear()
        return tuple(loads)

    def committed(self, plan: StepPlan) -> None:
        """The plan's transfers were done."""
        for save in plan.saves:
            self.store.end_save(save, self._saving.pop(save))
        for load in plan.loads:
            self.store.free(load.slot)
