"""Continuous batching: assembles each step from the requests it holds.

Everything here runs on the engine thread. `plan` hands out a step, `commit` takes its results;
one more step may be planned while one is outstanding (one step ahead).
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter
from time import perf_counter, perf_counter_ns

from asyncllm import telemetry
from asyncllm.errors import PromptTooLongError, RequestError
from asyncllm.kv.block_pool import InvariantError, Room
from asyncllm.kv.blocks import Copy, KvCache, Match, SequenceBlocks
from asyncllm.scheduler.chunking import ChunkPolicy
from asyncllm.scheduler.matching import find_match
from asyncllm.scheduler.request import Request, Sequence, State
from asyncllm.scheduler.step import (
    BlockCopy,
    DecodeMode,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    is_decode,
)
from asyncllm.scheduler.transfers import Transfers

_queue_key = attrgetter("queue_key")
_age_key = attrgetter("age_key")


class NoPlan(Enum):
    """Why there is no step."""

    IDLE = auto()  # nothing to run, or all of it is in flight
    COLLECT_FIRST = auto()  # commit the outstanding step, then plan again
    AWAIT_STORE = auto()  # plan again when the block store has moved on


@dataclass(frozen=True, slots=True)
class Emission:
    """What became of a sequence in a step: a token, prompt scores, its end, or several of them."""

    sequence: Sequence
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan that is out, and what planning it took."""

    plan: StepPlan
    started_ns: int
    reserve_ns: int
    admission_ns: int


class Scheduler:
    """Holds the requests from arrival to end.

    Args:
        cache: the K/V accounts.
        max_seqs: sequences that run at once.
        context_length: prompt and output tokens one sequence may have.
        chunk: chooses how many prompt tokens a step carries.
        decode_refusal: of the runner: why it does not serve rows in a form.
        transfers: to and from the block store, if there is one.

    Attributes:
        waiting: requests that wait for admission, none of their sequences running.
        admitted, resumed, preempted: sequences, counted as it happens.
        finished, cancelled, failed: sequences, by how they ended.
        steps: committed steps.
        launch_failures: reported by the runner.
        decode_mode, decode_mode_reason: of the newest plan, and why not a faster form.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        max_seqs: int,
        context_length: int,
        chunk: ChunkPolicy,
        decode_refusal: Callable[[DecodeMode, tuple[Row, ...]], str | None],
        transfers: Transfers | None = None,
    ) -> None:
        self.cache = cache
        self.max_seqs = max_seqs
        self.context_length = context_length
        self.chunk = chunk
        self.transfers = transfers
        self.waiting = 0
        self.admitted = self.resumed = self.preempted = 0
        self.finished = self.cancelled = self.failed = 0
        self.steps = self.launch_failures = 0
        self.decode_mode: DecodeMode = "idle"
        self.decode_mode_reason = ""
        self._decode_refusal = decode_refusal
        self._queue: list[Sequence] = []  # by queue_key: the first is the next to be admitted
        self._running: list[Sequence] = []  # by age_key: the last is the next victim
        self._live: dict[int, Sequence] = {}
        self._steps_out: deque[_Step] = deque()
        self._copies: list[Copy] = []
        self._released: list[int] = []
        self._ended: list[Emission] = []  # ends that planning brought about, for the next commit
        self._arrivals = 0
        self._preemptions = 0
        self._refused_at: tuple[Sequence, int] | None = None
        self._retried_growth = False  # since rows were planned last: a plan may only move blocks

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or any result or end is still to be committed.

        Or any block is on its way to or from the store.
        """
        if self._live or self._steps_out or self._ended:
            return True
        return self.transfers is not None and self.transfers.has_work

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def prefilling(self) -> int:
        """Running sequences that do not decode: their prefix is being computed or adopted."""
        return self.running - self.decoding

    @property
    def decoding(self) -> int:
        return sum(sequence.state is State.DECODING for sequence in self._running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLongError: if its prompt leaves no room for one output token in the context,
                or could never fit the K/V pool.
            RequestError: if its prompt is empty, or it asks for more outputs than run at once.
        """
        size, n = len(request.prompt_ids), request.params.n
        if size == 0:
            raise RequestError("prompt: it has no tokens; at least one is needed")
        if n > self.max_seqs:
            raise RequestError(f"n={n}: accepted is 1 to max_seqs={self.max_seqs}")
        if size >= self.context_length:
            raise PromptTooLongError(
                f"the prompt has {size} tokens; context_length={self.context_length} leaves room "
                f"for {self.context_length - 1} and one output token: shorten the prompt"
            )
        capacity = self.cache.capacity_tokens
        if capacity is not None and size > capacity:
            raise PromptTooLongError(self._too_long(size, self.cache.blocks_for(capacity)))
        limit = self.context_length
        if capacity is not None:
            limit = min(limit, capacity + 1)  # the last token's K/V is never needed
        if request.params.max_tokens is not None:
            limit = min(limit, size + request.params.max_tokens)
        request.arrival = self._arrivals
        self._arrivals += 1
        for sequence in request.sequences:
            sequence.limit = limit
            if self.cache.prefix_cache and request.prefix_cache:
                sequence.chain = self.cache.chain(request.cache_salt)
            sequence.queue_key = (request.priority, 1, request.arrival, sequence.index)
            self._live[sequence.sequence_id] = sequence
            self._enqueue(sequence)

    def cancel(self, request: Request) -> list[Sequence]:
        """End what has not ended of a request; its blocks are free when this returns."""
        ended = [sequence for sequence in request.sequences if not sequence.ended]
        for sequence in ended:
            sequence.finish_reason = "cancelled"
            self._end(sequence, State.CANCELLED)
        return ended

    def plan(self) -> StepPlan | NoPlan:
        """The next step, which counts as submitted from now on.

        A step without rows only carries the news that sequences ended: running it does nothing.
        """
        ahead = bool(self._steps_out)
        if len(self._steps_out) > 1:
            raise InvariantError("two steps are outstanding; commit one before planning")
        if self.transfers is not None:
            self._end_adoptions(self.transfers)
        while True:
            started = perf_counter_ns()
            preempted = self.preempted
            room = self._reserve_decodes(may_grow=not ahead)
            reserved = perf_counter_ns()
            if room is Room.READY and preempted == self.preempted and not self._ended:
                room = self._admit(may_grow=not ahead)
            admitted = perf_counter_ns()
            chosen: list[tuple[Sequence, int]] = []
            if room is not Room.AFTER_COLLECT:
                room = self._choose(chosen, may_grow=not ahead)
            if room is Room.AFTER_COLLECT:
                return NoPlan.COLLECT_FIRST
            moves = self.transfers is not None and self.transfers.prepare(bool(chosen))
            if chosen or moves or (self._ended and not ahead):
                chosen_ns = perf_counter_ns() - admitted
                reserve_ns = reserved - started + chosen_ns
                return self._submit(chosen, started, reserve_ns, admitted - reserved)
            if ahead:
                return NoPlan.IDLE
            if self._waits_for_store():
                return NoPlan.AWAIT_STORE
            if not self._queue:
                self.decode_mode, self.decode_mode_reason = "idle", ""
                self._retried_growth = False
                return NoPlan.IDLE
            if self._retried_growth or not self.cache.retry_growth():
                self._give_up(self._queue[0])
            self._retried_growth = True

    def live(self, result: RowResult) -> Sequence | None:
        """The sequence a result is for; `None` if it ended or was preempted meanwhile."""
        sequence = self._live.get(result.sequence_id)
        return sequence if sequence is not None and sequence.epoch == result.epoch else None

    def commit(self, result: StepResult, stops: Mapping[int, str]) -> list[Emission]:
        """Take the results of the oldest outstanding step.

        Args:
            result: what the runner collected.
            stops: for sequences that a stop string ends with this step, that string.

        Returns:
            What to tell the consumers, in the order of the rows.
        """
        if not self._steps_out:
            raise InvariantError("a result came, but no step is outstanding")
        step = self._steps_out.popleft()
        plan = step.plan
        if [row.sequence_id for row in plan.rows] != [row.sequence_id for row in result.rows]:
            raise InvariantError("the results are not those of the oldest plan's rows")
        if self.transfers is not None:
            self.transfers.committed(plan)
        emissions, self._ended = self._ended, []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            sequence = self.live(row_result)
            if sequence is None:
                continue
            if row_result.error is not None:
                emissions += self._fail(sequence.request, row_result.error)
            else:
                stop = stops.get(sequence.sequence_id)
                emissions += self._advance(sequence, row, row_result, stop)
        if plan.rows and not (plan.saves or plan.loads):
            decodes = sum(map(is_decode, plan.rows))
            self.chunk.observe(plan.prompt_rows, decodes, result.model_s)
        self._record(step, result)
        return emissions

    def check(self) -> None:
        """Compare every account with every other; for idle moments.

        Raises:
            InvariantError: saying what is wrong.
        """
        requests = {sequence.request for sequence in self._live.values()}
        if self.waiting != sum(request.waits for request in requests):
            raise InvariantError(f"{self.waiting} requests counted as waiting")
        held: list[SequenceBlocks] = []
        for sequence in self._running:
            if not sequence.is_running or sequence.blocks is None:
                raise InvariantError(f"sequence {sequence.sequence_id} runs without blocks")
            if not 0 <= sequence.committed <= sequence.submitted < sequence.limit:
                raise InvariantError(
                    f"sequence {sequence.sequence_id}: {sequence.committed} tokens committed, "
                    f"{sequence.submitted} submitted, limit {sequence.limit}"
                )
            held.append(sequence.blocks)
        for sequence in self._queue:
            if sequence.state not in (State.WAITING, State.PREEMPTED) or sequence.blocks:
                raise InvariantError(f"sequence {sequence.sequence_id} waits but is not free to")
        ids = sorted(sequence.sequence_id for sequence in (*self._queue, *self._running))
        if ids != sorted(self._live):
            raise InvariantError("a live sequence is neither waiting nor running, or both")
        if self._running != sorted(self._running, key=_age_key):
            raise InvariantError("the running sequences are out of order")
        if self._queue != sorted(self._queue, key=_queue_key):
            raise InvariantError("the queue is out of order")
        if len(self._running) > self.max_seqs:
            raise InvariantError(f"{len(self._running)} sequences run, max_seqs={self.max_seqs}")
        if not self._steps_out and any(s.committed != s.submitted for s in self._running):
            raise InvariantError("tokens are in flight but no step is")
        self.cache.check(held)
        if self.transfers is not None:
            adopting = (s.sequence_id for s in self._running if s.state is State.ADOPTING)
            self.transfers.check(set(adopting))

    # Planning

    def _reserve_decodes(self, may_grow: bool) -> Room:
        """Blocks for the rows that continue an output, the oldest first; preempts for them."""
        retried = False
        for sequence in list(self._running):
            while sequence.is_running and sequence.decodes_next and sequence.can_advance:
                room = self._extend(sequence, 1, may_grow)
                if room is Room.READY:
                    break
                if not may_grow:
                    return Room.AFTER_COLLECT
                victim = self._running[-1]
                if victim is not self._running[0]:
                    self._preempt(victim)
                elif retried or not self.cache.retry_growth():
                    self._finish_early(sequence)  # alone, and the pool has no more
                else:
                    retried = True
        return Room.READY

    def _admit(self, may_grow: bool) -> Room:
        """Let the first of the queue run, and the next, while there is room; nobody is skipped."""
        while self._queue and len(self._running) < self.max_seqs:
            sequence = self._queue[0]
            version = self.cache.version
            if self._refused_at == (sequence, version):
                break
            match = find_match(sequence, self.cache, self.transfers)
            if match is None:
                break
            blocks = self.cache.admit(
                match, sequence.length, self._life(sequence), may_grow, self._copies
            )
            if blocks is Room.AFTER_COLLECT:
                return blocks
            if isinstance(blocks, Room):
                self._refused_at = sequence, self.cache.version
                break
            self._dequeue(sequence)
            self._hold(sequence, blocks, match)
        return Room.READY

    def _waits_for_store(self) -> bool:
        """Whether there is nothing to do before blocks have arrived there, or from there."""
        if self.transfers is None or not self.transfers.has_work:
            return False
        return bool(self._running) or not self._queue

    @staticmethod
    def _life(sequence: Sequence) -> int:
        return max(sequence.length, sequence.limit - 1)

    def _hold(self, sequence: Sequence, blocks: SequenceBlocks, match: Match) -> None:
        """An admitted sequence gets its blocks, and runs as soon as they have what it reuses."""
        sequence.blocks = blocks
        insort(self._running, sequence, key=_age_key)
        self._count(sequence.request, running=1)
        transfers, chain = self.transfers, sequence.chain
        if transfers is not None and chain is not None and not match.forked:
            transfers.reuse(match, chain)
            if match.stored():
                sequence.state = State.ADOPTING
                transfers.adopt(sequence, match, self.cache)
                return
        self._start(sequence, match)

    def _end_adoptions(self, transfers: Transfers) -> None:
        """Let those run whose blocks are there; match those anew of which some are not."""
        for adoption in transfers.poll():
            sequence = adoption.sequence
            if adoption.failed:
                sequence.failed_adoptions += 1
                self._stop_running(sequence)
                self._release(sequence)
                sequence.state = State.WAITING
                self._enqueue(sequence)
            else:
                self._start(sequence, adoption.match)

    def _start(self, sequence: Sequence, match: Match) -> None:
        if sequence.admitted_at is None:
            sequence.admitted_at = perf_counter()
            sequence.cached_tokens = match.tokens
            self.admitted += 1
        else:
            self.resumed += 1
        if not match.forked:
            self.cache.prefix_hit_tokens += match.tokens
        sequence.submitted = sequence.committed = match.tokens
        sequence.state = State.PREFILLING

    def _choose(self, chosen: list[tuple[Sequence, int]], may_grow: bool) -> Room:
        """Every row that continues an output, then prompt rows up to the chunk, oldest first."""
        ready = [sequence for sequence in self._running if sequence.can_advance]
        chosen += [(sequence, 1) for sequence in ready if sequence.decodes_next]
        prompts = [sequence for sequence in ready if not sequence.decodes_next]
        left = self.chunk.choose(len(chosen)) if prompts else 0
        for sequence in prompts:
            count = min(left, sequence.remaining)
            if count == 0:
                break
            left -= count
            chosen.append((sequence, count))
        for sequence, count in chosen:
            # One that was just admitted has its ring only reserved, even if it decodes at once.
            if sequence.state is State.PREFILLING:
                room = self._extend(sequence, count, may_grow)
                if room is Room.AFTER_COLLECT:
                    return room
                if room is Room.NONE:
                    raise InvariantError("blocks reserved at admission are not there")
        return Room.READY

    def _submit(
        self, chosen: list[tuple[Sequence, int]], started: int, reserve_ns: int, admission_ns: int
    ) -> StepPlan:
        rows = tuple(sequence.next_row(count) for sequence, count in chosen)
        self._retried_growth = self._retried_growth and not rows
        self.decode_mode, self.decode_mode_reason = self._mode(rows)
        transfers = self.transfers
        plan = StepPlan(
            rows,
            saves=() if transfers is None else transfers.next_saves(),
            copies=tuple(BlockCopy(*copy) for copy in self._copies),
            loads=() if transfers is None else transfers.next_loads(self.cache),
            released=tuple(self._released),
            decode_mode=self.decode_mode,
            decode_mode_reason=self.decode_mode_reason,
        )
        self._copies.clear()
        self._released.clear()
        self._steps_out.append(_Step(plan, started, reserve_ns, admission_ns))
        return plan

    def _mode(self, rows: tuple[Row, ...]) -> tuple[DecodeMode, str]:
        """The decode form of a step, and why it is not a faster one."""
        decodes = [row for row in rows if is_decode(row)]
        if not rows:
            return "idle", ""
        if not decodes:
            return "plain", "no sequence is decoding"
        if len(decodes) == 1 and len(rows) > 1:
            return "plain", "a prompt chunk shares the step"
        mode: DecodeMode = "pipelined" if len(decodes) == 1 else "batched"
        refusal = self._decode_refusal(mode, rows)
        if refusal is not None:
            return "plain", refusal
        return mode, "" if mode == "pipelined" else f"{len(decodes)} sequences are decoding"

    # Moving on and ending

    def _advance(
        self, sequence: Sequence, row: Row, result: RowResult, stop: str | None
    ) -> list[Emission]:
        sequence.committed = row.offset + row.count
        if sequence.chain is not None and sequence.blocks is not None:
            self.cache.publish(sequence.blocks, sequence.chain, sequence.tokens, sequence.committed)
        scores = sequence.request.new_scores(row, result)
        if not row.wants_token:
            return [Emission(sequence, prompt_logprobs=scores)] if scores else []
        token = result.token
        if token is None:
            raise InvariantError(f"sequence {sequence.sequence_id} got no token and no error")
        at_end = sequence.ends_with(token)
        sequence.tokens_in_flight -= 1
        sequence.output_ids.append(token)
        sequence.state = State.DECODING
        if sequence.first_token_at is None:
            sequence.first_token_at = perf_counter()
        if stop is not None or at_end:
            sequence.stop = token if stop is None else stop
            sequence.finish_reason = "stop"
        elif sequence.length >= sequence.limit:
            sequence.finish_reason = "length"
        finished = sequence.finish_reason is not None
        if finished:
            self._end(sequence, State.FINISHED)
        return [Emission(sequence, token, result.logprob, scores, finished)]

    def _fail(self, request: Request, error: Exception) -> list[Emission]:
        """End all of a request with an error."""
        ended = [sequence for sequence in request.sequences if not sequence.ended]
        for sequence in ended:
            sequence.error = error
            self._end(sequence, State.FAILED)
        return [Emission(sequence, finished=True) for sequence in ended]

    def _finish_early(self, sequence: Sequence) -> None:
        """End a sequence at what the pool turned out to hold."""
        sequence.finish_reason = "length"
        self._end(sequence, State.FINISHED)
        self._ended.append(Emission(sequence, finished=True))

    def _give_up(self, sequence: Sequence) -> None:
        """End the first of the queue: nothing runs, and still there is no room for it."""
        if sequence.output_ids:
            self._finish_early(sequence)
        else:
            text = self._too_long(sequence.length, self.cache.blocks_total)
            self._ended += self._fail(sequence.request, PromptTooLongError(text))

    def _too_long(self, tokens: int, blocks: int) -> str:
        size = self.cache.block_tokens
        return (
            f"the prompt has {tokens} tokens, which need {self.cache.blocks_for(tokens)} blocks of "
            f"{size} tokens; the K/V pool can hold {blocks}: raise kv_bytes or shorten the prompt"
        )

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=_queue_key)
        self._count(sequence.request, queued=1)

    def _dequeue(self, sequence: Sequence) -> None:
        del self._queue[bisect_left(self._queue, sequence.queue_key, key=_queue_key)]
        self._count(sequence.request, queued=-1)

    def _count(self, request: Request, *, queued: int = 0, running: int = 0) -> None:
        waited = request.waits
        request.queued += queued
        request.running += running
        self.waiting += request.waits - waited

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[bisect_left(self._running, sequence.age_key, key=_age_key)]
        self._count(sequence.request, running=-1)

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self._release(sequence)
        sequence.epoch += 1
        sequence.submitted = sequence.committed = sequence.tokens_in_flight = 0
        sequence.state = State.PREEMPTED
        sequence.queue_key = (sequence.request.priority, 0, self._preemptions, 0)
        self._preemptions += 1
        self.preempted += 1
        self._enqueue(sequence)

    def _end(self, sequence: Sequence, state: State) -> None:
        if self._live.pop(sequence.sequence_id, None) is not None:
            if sequence.is_running:
                self._stop_running(sequence)
            else:
                self._dequeue(sequence)
        self._release(sequence)
        if sequence.admitted_at is not None:
            self._released.append(sequence.sequence_id)
        sequence.state = state
        if state is State.FINISHED:
            self.finished += 1
        elif state is State.CANCELLED:
            self.cancelled += 1
        else:
            self.failed += 1

    def _extend(self, sequence: Sequence, count: int, may_grow: bool) -> Room:
        if sequence.blocks is None:
            raise InvariantError(f"sequence {sequence.sequence_id} runs without blocks")
        return self.cache.extend(sequence.blocks, sequence.submitted, count, may_grow, self._copies)

    def _release(self, sequence: Sequence) -> None:
        if sequence.blocks is not None:
            if self.transfers is not None:
                self.transfers.abandon(sequence)
            self.cache.release(sequence.blocks)
            sequence.blocks = None

    def _record(self, step: _Step, result: StepResult) -> None:
        self.steps += 1
        for failure in result.launch_failures:
            self.launch_failures += 1
            telemetry.record("launch-failure", level=logging.WARNING, failure=failure)
        if telemetry.enabled():
            telemetry.record(
                "sched-phase",
                admission_ns=step.admission_ns,
                reserve_ns=step.reserve_ns,
                model_ns=round(result.model_s * 1e9),
                total_ns=perf_counter_ns() - step.started_ns,
                rows=len(step.plan.rows),
                prompt_tokens=step.plan.prompt_rows,
                decode_mode=step.plan.decode_mode,
            )
