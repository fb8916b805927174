"""A runner without a model: tokens are a function of history, and the cache is verified.

It keeps, for every block, which token of which history was written where, executes the copies and
transfers, and looks at everything a row's queries would see.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from asyncllm.kv.blocks import KvCache
from asyncllm.kv.store import BlockStore
from asyncllm.options import SamplingParams
from asyncllm.scheduler.chunking import ChunkPolicy
from asyncllm.scheduler.request import Request, State
from asyncllm.scheduler.request import Sequence as Output
from asyncllm.scheduler.scheduler import Emission, NoPlan, Scheduler
from asyncllm.scheduler.step import (
    BlockTransfer,
    DecodeMode,
    LayerGroup,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    is_decode,
)
from asyncllm.scheduler.transfers import Transfers

END = 0
VOCABULARY = 50
CELL = struct.Struct("<qQ")
Cell = tuple[int, int]
"""(position, hash of all tokens up to it): what K/V at a position depends on."""


def _mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % ((1 << 61) - 1)


def next_token(history: int, seed: int, index: int, vocabulary: int = VOCABULARY) -> int:
    data = f"{history} {seed} {index}".encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") % vocabulary


def continuation(
    prompt: Sequence[int],
    count: int,
    *,
    seed: int = 0,
    index: int = 0,
    vocabulary: int = VOCABULARY,
    end: int | None = END,
) -> list[int]:
    """What the runner gives for a prompt that has the machine to itself."""
    state = 0
    for token in prompt:
        state = _mix(state, token)
    output: list[int] = []
    while len(output) < count and (not output or output[-1] != end):
        output.append(next_token(state, seed, index, vocabulary))
        state = _mix(state, output[-1])
    return output


@dataclass
class _History:
    """Tokens of one sequence and the hash after each."""

    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    def add(self, token: int) -> None:
        self.hashes.append(_mix(self.hashes[-1] if self.hashes else 0, token))
        self.tokens.append(token)


class FakeRunner:
    """Implements `Runner`; `grants` is how many blocks of each group there is memory for."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_tokens: int,
        *,
        one_step_ahead: bool = False,
        vocabulary: int = VOCABULARY,
        grants: Sequence[int] | None = None,
        seconds: Callable[[StepPlan], float] = lambda plan: 0.001,
    ) -> None:
        self.one_step_ahead = one_step_ahead
        self.decode_refusals: dict[DecodeMode, str] = {}
        self.asked: list[tuple[DecodeMode, int]] = []  # what forms, for how many rows
        self.broken: dict[int, Exception] = {}  # sequence ids whose rows fail
        self.launch_failures: list[str] = []
        self.copies = self.growth_calls = 0
        self.scored_rows = 0
        self.slots: Sequence[memoryview] = ()  # of a block store
        self._groups = groups
        self._size = block_tokens
        self._vocabulary = vocabulary
        self.memory = list(grants) if grants is not None else [group.capacity for group in groups]
        self._seconds = seconds
        self._cells: list[list[list[Cell | None]]] = [[] for _ in groups]
        self._histories: dict[int, _History] = {}
        self._results: deque[tuple[int, StepResult]] = deque()
        self._tickets = 0

    def submit(self, plan: StepPlan) -> int:
        self._save(plan.saves)
        for copy in plan.copies:
            cells = self._cells[copy.group]
            assert copy.source != copy.target
            cells[copy.target] = list(cells[copy.source])
            self.copies += 1
        self._load(plan.loads)
        assert len({row.sequence_id for row in plan.rows}) == len(plan.rows)
        written: dict[tuple[int, int], int] = {}
        for row in plan.rows:
            self._write(row, written)
        rows = tuple(self._answer(row, written) for row in plan.rows)
        for sequence_id in plan.released:
            self._histories.pop(sequence_id, None)
        failures, self.launch_failures = tuple(self.launch_failures), []
        self._tickets += 1
        result = StepResult(rows, self._seconds(plan), failures)
        self._results.append((self._tickets, result))
        return self._tickets

    def collect(self, ticket: int) -> StepResult:
        expected, result = self._results.popleft()
        assert ticket == expected, "tickets are collected in order"
        return result

    def overlaps(self, plan: StepPlan) -> bool:
        return self.one_step_ahead

    def decode_refusal(self, mode: DecodeMode, rows: Sequence[Row]) -> str | None:
        self.asked.append((mode, len(rows)))
        return self.decode_refusals.get(mode)

    def tune(self, plan: StepPlan) -> None:
        pass

    def grow(self, group: int, blocks: int) -> int:
        assert not self._results, "the pool grew while a step was outstanding"
        self.growth_calls += 1
        granted = min(blocks, self.memory[group])
        self.memory[group] -= granted
        self._cells[group] += [[None] * self._size for _ in range(granted)]
        return granted

    def close(self) -> None:
        self._results.clear()

    def _save(self, saves: Sequence[BlockTransfer]) -> None:
        for save in saves:
            cells = self._cells[save.group][save.block]
            data = b"".join(CELL.pack(*(cell or (-1, 0))) for cell in cells)
            self.slots[save.slot][: len(data)] = data

    def _load(self, loads: Sequence[BlockTransfer]) -> None:
        for load in loads:
            data = self.slots[load.slot][: CELL.size * self._size]
            self._cells[load.group][load.block] = list(CELL.iter_unpack(data))

    def _history(self, row: Row) -> _History:
        history = self._histories.get(row.sequence_id)
        if history is None:
            history = self._histories[row.sequence_id] = _History()
            for token in row.sampling.prompt_ids:
                history.add(token)
        return history

    def _block(self, row: Row, group: int, position: int) -> int:
        table = row.block_tables[group]
        entry = position // self._size
        if self._groups[group].window is not None:
            entry %= len(table)
        return table[entry]

    def _write(self, row: Row, written: dict[tuple[int, int], int]) -> None:
        history = self._history(row)
        stop = row.offset + row.count
        if row.chained:
            assert row.count == 1 and not row.tokens and row.wants_token and row.output_count
            assert self._results, "a chained row needs the step before"
            assert stop == len(history.tokens)
        else:
            assert list(row.tokens) == history.tokens[row.offset : stop]
        assert row.wants_token == (stop == len(history.tokens))
        assert row.output_count == len(history.tokens) - len(row.sampling.prompt_ids)
        for group, cells in enumerate(self._cells):
            for position in range(row.offset, stop):
                block = self._block(row, group, position)
                assert written.setdefault((group, block), row.sequence_id) == row.sequence_id
                cells[block][position % self._size] = (position, history.hashes[position])

    def _answer(self, row: Row, written: Mapping[tuple[int, int], int]) -> RowResult:
        history = self._history(row)
        stop = row.offset + row.count
        for group, layer_group in enumerate(self._groups):
            window = layer_group.window
            first = 0 if window is None else max(0, row.offset - window + 1)
            for position in range(first, stop):
                block = self._block(row, group, position)
                assert written.get((group, block), row.sequence_id) == row.sequence_id, (
                    f"block {block} is written by one row and seen by another"
                )
                cell = self._cells[group][block][position % self._size]
                assert cell == (position, history.hashes[position]), (
                    f"sequence {row.sequence_id} sees {cell} at position {position}, group {group}"
                )
        scores: tuple[TokenLogprob, ...] = ()
        prompt = row.sampling.prompt_ids
        if row.sampling.params.prompt_logprobs is not None and row.offset < len(prompt) - 1:
            following = prompt[row.offset + 1 : stop + 1]
            scores = tuple(TokenLogprob(token, -float(token)) for token in following)
            self.scored_rows += 1
        if not row.wants_token:
            return RowResult(row.sequence_id, row.epoch, prompt_logprobs=scores)
        state, spec = history.hashes[-1], row.sampling
        token = next_token(state, spec.seed, spec.index, self._vocabulary)
        history.add(token)  # of a failed row too: the next step may have been chained to it
        if row.sequence_id in self.broken:
            return RowResult(row.sequence_id, row.epoch, error=self.broken[row.sequence_id])
        logprob = None if spec.params.logprobs is None else TokenLogprob(token, -1.0)
        return RowResult(row.sequence_id, row.epoch, token, logprob, scores)


class Engine:
    """The engine thread's loop without a thread; checks what must hold around every step."""

    def __init__(
        self,
        *,
        capacity: Sequence[int] = (64,),
        windows: Sequence[int | None] = (None,),
        block_tokens: int = 4,
        max_seqs: int = 8,
        context_length: int = 1 << 20,
        chunk: int = 16,
        ahead: bool = False,
        prefix_cache: bool = True,
        vocabulary: int = VOCABULARY,
        grants: Sequence[int] | None = None,
        policy: ChunkPolicy | None = None,
        seconds: Callable[[StepPlan], float] = lambda plan: 0.001,
        refusals: Mapping[DecodeMode, str] | None = None,
        store: Callable[[Sequence[int], Sequence[memoryview]], BlockStore] | None = None,
        slots: int = 4,
    ) -> None:
        block_bytes = CELL.size * block_tokens
        groups = [
            LayerGroup(window, (index,), block_bytes, blocks)
            for index, (window, blocks) in enumerate(zip(windows, capacity, strict=True))
        ]
        self.runner = FakeRunner(
            groups,
            block_tokens,
            one_step_ahead=ahead,
            vocabulary=vocabulary,
            grants=grants,
            seconds=seconds,
        )
        self.runner.decode_refusals |= refusals or {}
        self.policy = policy or ChunkPolicy(chunk, 1e9)
        transfers = None
        if store is not None:
            self.runner.slots = [memoryview(bytearray(block_bytes)) for _ in range(slots)]
            opened = store([block_bytes] * len(groups), self.runner.slots)
            transfers = Transfers(opened, groups, lambda: self.policy.prompt_rate)
        self.cache = KvCache(
            groups,
            block_tokens=block_tokens,
            max_chunk=self.policy.maximum,
            grow=self.runner.grow,
            fingerprint=b"fake",
            prefix_cache=prefix_cache,
            below=transfers,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_seqs=max_seqs,
            context_length=context_length,
            chunk=self.policy,
            decode_refusal=self.runner.decode_refusal,
            transfers=transfers,
        )
        self.before_step: Callable[[], object] = lambda: None
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []
        self.emissions: list[Emission] = []
        self.stop_at: dict[int, int] = {}  # sequence id: output tokens after which text stops it
        self._vocabulary = vocabulary
        self._ticket: int | None = None
        self._names = 0

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        *,
        seed: int = 0,
        priority: int = 0,
        salt: bytes = b"",
        prefix_cache: bool = True,
        end: int = END,
        **params: object,
    ) -> Request:
        """Make and add a request."""
        sampling = SamplingParams(max_tokens=max_tokens).updated(params).resolved({})
        self._names += 1
        request = Request(
            f"r{self._names}",
            prompt,
            sampling,
            seed=seed,
            end_ids=frozenset({end}),
            priority=priority,
            cache_salt=salt,
            prefix_cache=prefix_cache,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def cancel(self, request: Request) -> list[Output]:
        ended = self.scheduler.cancel(request)
        self.requests = [other for other in self.requests if other is not request]
        return ended

    def step(self) -> StepPlan | NoPlan:
        """One turn of the engine's loop."""
        self.before_step()
        plan = self._plan()
        if plan is NoPlan.COLLECT_FIRST:
            assert self._ticket is not None, "asked to collect, but nothing is outstanding"
            self.collect()
            plan = self._plan()
            assert plan is not NoPlan.COLLECT_FIRST
        if isinstance(plan, NoPlan):
            waits = plan is NoPlan.AWAIT_STORE
            assert waits or self._ticket is not None or not self.scheduler.has_work
            self.collect()
            return plan
        self.plans.append(plan)
        if self.runner.overlaps(plan):
            ticket = self.runner.submit(plan)
            self.collect()
            self._ticket = ticket
        else:
            self.collect()
            self._ticket = self.runner.submit(plan)
            self.collect()
        return plan

    def collect(self) -> None:
        if self._ticket is None:
            return
        ticket, self._ticket = self._ticket, None
        result = self.runner.collect(ticket)
        stops: dict[int, str] = {}
        for row in result.rows:
            sequence = self.scheduler.live(row)
            if sequence is None or row.token is None:
                continue
            if len(sequence.output_ids) + 1 == self.stop_at.get(sequence.sequence_id):
                stops[sequence.sequence_id] = "STOP"
        self.emissions += self.scheduler.commit(result, stops)

    def run(self, steps: int = 100_000) -> int:
        """Step until nothing is left to do.

        Returns:
            The steps it took, without those that only moved blocks.
        """
        done = 0
        for _ in range(10 * steps):
            if not self.scheduler.has_work:
                self.scheduler.check()
                assert self.cache.blocks_used == 0, "blocks are left with no one"
                return done
            plan = self.step()
            if isinstance(plan, StepPlan):
                done += bool(plan.rows) or not (plan.saves or plan.loads)
            if done > steps:
                break
        raise AssertionError(f"requests are still unfinished after {steps} steps")

    def expected(self, sequence: Output, count: int) -> list[int]:
        request = sequence.request
        return continuation(
            request.prompt_ids,
            count,
            seed=sequence.spec.seed,
            index=sequence.index,
            vocabulary=self._vocabulary,
            end=None if request.params.ignore_eos else END,
        )

    def _plan(self) -> StepPlan | NoPlan:
        scheduler = self.scheduler
        live = [s for request in self.requests for s in request.sequences if not s.ended]
        running = sorted((s for s in live if s.is_running), key=lambda s: s.age_key)
        queue = sorted((s for s in live if not s.is_running), key=lambda s: s.queue_key)
        advance = {s.sequence_id for s in running if s.decodes_next and s.can_advance}
        before = {s.sequence_id: s.output_ids[:] for s in live}
        plan = scheduler.plan()
        admitted = [s for s in queue if s.is_running]
        assert admitted == queue[: len(admitted)], "someone was skipped"
        victims = [s for s in running if s.state is State.PREEMPTED]
        still = [s for s in running if not s.ended]
        assert victims == still[len(still) - len(victims) :], "not the youngest was the victim"
        assert not (admitted and victims), "an admission and a preemption in one step"
        assert all(before[s.sequence_id] == s.output_ids for s in live)
        if isinstance(plan, StepPlan):
            assert plan.prompt_rows <= self.policy.maximum
            rows = {row.sequence_id for row in plan.rows if is_decode(row)}
            lost = {s.sequence_id for s in victims} | {s.sequence_id for s in running if s.ended}
            assert advance - lost <= rows, "a decoding sequence was left out"
        return plan


def random_prompt(random_: random.Random, longest: int) -> list[int]:
    """Prompts that often share beginnings."""
    stem = random_.randrange(3)
    shared = [stem * 7 + i % 5 + 1 for i in range(random_.randint(0, longest))]
    own = [random_.randrange(1, VOCABULARY) for _ in range(random_.randint(0, 6))]
    return (shared + own)[:longest] or [1]
