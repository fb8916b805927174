"""Fork, append, free, evict and adopt in any order: every sequence reads back its own history.

The plain model keeps, for each sequence, its tokens; and for each block of memory, which position
of which history was written there last. What is evicted goes to a dictionary that stands for a
block store, from where later sequences adopt it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.kv.block_pool import Room
from asyncllm.kv.blocks import Copy, KvCache, Match, SequenceBlocks
from asyncllm.kv.prefix import Chain, Prefix
from asyncllm.scheduler.step import LayerGroup

LIFE = 60  # tokens a sequence may get
CHUNK = 6
Cell = tuple[int, int]  # a position, and the hash of the history up to it


@dataclass(eq=False)
class Line:
    """A sequence of the model."""

    tokens: list[int]
    blocks: SequenceBlocks
    chain: Chain

    def cells(self) -> list[Cell]:
        return [(at, hash(tuple(self.tokens[: at + 1]))) for at in range(len(self.tokens))]


class Machine:
    """A cache under test and the memory that its block numbers stand for."""

    def __init__(self, windows: tuple[int | None, ...], size: int, capacity: int) -> None:
        groups = [LayerGroup(window, (), 1, capacity) for window in windows]
        self.size, self.windows = size, windows
        self.memory: list[list[list[Cell | None]]] = [
            [[None] * size for _ in range(capacity)] for _ in groups
        ]
        self.stored: dict[tuple[int, Prefix], list[Cell | None]] = {}
        self.lines: list[Line] = []
        self.adopted = self.forked = self.copied = self.evictions = 0
        self.cache = KvCache(
            groups,
            block_tokens=size,
            max_chunk=CHUNK,
            grow=lambda group, blocks: blocks,
            fingerprint=b"model",
            prefix_cache=True,
            below=self,
        )

    # The tier below.

    def cached(self, group: int, block: int, prefix: Prefix) -> None:
        """It will be told again if the block is evicted."""

    def evicted(self, group: int, block: int, prefix: Prefix) -> None:
        for line in self.lines:
            assert block not in self._held(line)[group], "a block of a live prefix is evicted"
        self.stored[group, prefix] = list(self.memory[group][block])
        self.evictions += 1

    def _held(self, line: Line) -> list[set[int]]:
        blocks = line.blocks
        return [
            {
                blocks.entry(group, ring, number)
                for number in range(blocks.first[group], blocks.last[group])
            }
            for group, ring in enumerate(self.cache.rings)
        ]

    # What may happen.

    def start(self, tokens: list[int], keep: bool = True) -> None:
        """A new prompt, as much of it adopted as pool and store have."""
        chain = self.cache.chain(b"")
        most = len(tokens) - 1
        chain.reach(lambda start, stop: tokens[start:stop], most // self.size)
        match = self.cache.match(chain, most, lambda *key: key in self.stored)
        line = self._admit(match, tokens, chain)
        if line is not None:
            self.adopted += len(match.stored())
            for group, number in match.stored():
                block = line.blocks.entry(group, self.cache.rings[group], number)
                self.memory[group][block] = list(self.stored[group, chain[number]])
                self.cache.pools[group].publish(block, chain[number])
            self._compute(line, match.tokens, len(tokens))
            if not keep:
                self.free(line)

    def fork(self, source: Line, token: int) -> None:
        """Another sequence goes on from all that one has, with a token of its own."""
        match = self.cache.match_sibling(source.blocks, len(source.tokens))
        assert match is not None, "what it has now can always be shared"
        line = self._admit(match, [*source.tokens, token], self.cache.chain(b""))
        if line is not None:
            self.forked += 1
            self._compute(line, match.tokens, len(line.tokens))

    def append(self, line: Line, tokens: list[int]) -> None:
        """The sequence gets more tokens, whose K/V is computed; it ends if there is no room."""
        start = len(line.tokens)
        line.tokens += tokens
        if not self._compute(line, start, len(line.tokens)):
            self.free(line)

    def free(self, line: Line) -> None:
        self.lines.remove(line)
        self.cache.release(line.blocks)

    def _admit(self, match: Match, tokens: list[int], chain: Chain) -> Line | None:
        copies: list[Copy] = []
        blocks = self.cache.admit(match, len(tokens), LIFE, True, copies)
        self._copy(copies)
        if isinstance(blocks, Room):
            return None
        line = Line(tokens, blocks, chain)
        self.lines.append(line)
        return line

    def _copy(self, copies: list[Copy]) -> None:
        for group, source, target in copies:
            self.memory[group][target] = list(self.memory[group][source])
            self.copied += 1

    def _compute(self, line: Line, start: int, stop: int) -> bool:
        cells = line.cells()
        for offset in range(start, stop, CHUNK):
            count, copies = min(CHUNK, stop - offset), list[Copy]()
            room = self.cache.extend(line.blocks, offset, count, True, copies)
            self._copy(copies)
            if room is not Room.READY:
                del line.tokens[offset:]
                return False
            for group, ring in enumerate(self.cache.rings):
                for position in range(offset, offset + count):
                    block = line.blocks.entry(group, ring, position // self.size)
                    self.memory[group][block][position % self.size] = cells[position]
            self.cache.publish(
                line.blocks,
                line.chain,
                lambda first, last: line.tokens[first:last],
                offset + count,
            )
        return True

    # What must hold.

    def check(self) -> None:
        self.cache.check(line.blocks for line in self.lines)
        for line in self.lines:
            cells, length = line.cells(), len(line.tokens)
            for group, (window, ring) in enumerate(
                zip(self.windows, self.cache.rings, strict=True)
            ):
                first = 0 if window is None else max(0, length - window + 1)
                for position in range(first, length):
                    block = line.blocks.entry(group, ring, position // self.size)
                    found = self.memory[group][block][position % self.size]
                    assert found == cells[position], (group, position)


STEMS = [[stem * 10 + at % 4 for at in range(40)] for stem in (1, 1, 2)]


def live_through(machine: Machine, script: list[tuple[int, int, int]]) -> None:
    for kind, which, amount in script:
        lines = machine.lines
        if kind <= 1 or not lines:
            stem = STEMS[which % len(STEMS)]
            machine.start([*stem[: amount % 37 + 1], which % 5], keep=kind > 0 or which % 2 == 0)
        elif kind == 2 and len(lines[which % len(lines)].tokens) < LIFE - 1:
            machine.fork(lines[which % len(lines)], amount)
        elif kind in (3, 4):
            line = lines[which % len(lines)]
            count = min(amount % 9 + 1, LIFE - 1 - len(line.tokens))
            if count > 0:
                machine.append(line, [(which + at) % 3 for at in range(count)])
        else:
            machine.free(lines[which % len(lines)])
        machine.check()
    for line in list(machine.lines):
        machine.free(line)
    machine.check()
    assert machine.cache.blocks_used == 0


OPERATION = st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 40))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([(None,), (None, 5), (7,), (None, 3, 11)]),
    st.sampled_from([1, 2, 4, 5]),
    st.integers(10, 60),
    st.lists(OPERATION, max_size=40),
)
def test_every_sequence_reads_back_its_own_history(
    windows: tuple[int | None, ...], size: int, capacity: int, script: list[tuple[int, int, int]]
) -> None:
    live_through(Machine(windows, size, capacity), script)


def test_the_model_meets_what_it_is_for() -> None:
    """A fixed run in which every kind of event happens many times."""
    import random

    rng = random.Random(1)
    machine = Machine((None, 6), 4, 40)
    script = [(rng.randrange(6), rng.randrange(8), rng.randrange(41)) for _ in range(1500)]
    live_through(machine, script)
    assert machine.forked > 50
    assert machine.copied > 20
    assert machine.evictions > 100
    assert machine.adopted > 50
