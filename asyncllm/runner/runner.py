"""`StepRunner`: executes plans with a program that computes on the spot, all rows in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from asyncllm.model.program import Chunk
from asyncllm.sampling.sampler import (
    Sampled,
    Sampler,
    SamplingState,
    prompt_logprobs,
    sick_logits,
)
from asyncllm.scheduler.step import (
    DecodeMode,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    Ticket,
    TokenLogprob,
)

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool
    from asyncllm.sampling.state import Draw

# Rows of logits made at a time; it bounds their buffer, whatever is asked for.
LOGITS_ROWS: Final = 32


class Program(Protocol):
    """What computes: the plain one, operation by operation, or one that is fused."""

    def forward(
        self,
        chunks: Sequence[Chunk],
        wanted: Sequence[int] = (),
        draws: Sequence[Draw | None] = (),
    ) -> object:
        """One pass over the weights.

        Args:
            chunks: rows of some sequences.
            wanted: rows whose logits will be asked for next, at most `LOGITS_ROWS`; a program may
                make them in the same pass, and choose tokens by them.
            draws: how a token of each of these is chosen; `None`: by the sampler.
        """

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of some rows of the last pass, float32 [rows, vocabulary or more]."""

    def choices(
        self, rows: Sequence[int], draws: Sequence[Draw | None]
    ) -> list[tuple[int, float]] | None:
        """The token of each row and its logit, where the program chooses itself.

        Those of rows without a draw mean nothing.
        """


class StepRunner:
    """Runs a program. The work is done in `submit`.

    Args:
        program: what computes.
        pool: where K and V are; closed with the runner.
        vocab_size: tokens that may be chosen; the embedding may have more rows, as padding.
        name: of the backend, for the reason that it does not pipeline.
    """

    def __init__(self, program: Program, pool: KvPool, *, vocab_size: int, name: str) -> None:
        self._name = name
        self._program = program
        self._pool = pool
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size)
        self._states: dict[int, SamplingState] = {}

    def submit(self, plan: StepPlan) -> Ticket:
        """Do the step; the ticket is its result."""
        return self.run(plan)

    def run(self, plan: StepPlan) -> StepResult:
        """Do a step.

        Raises:
            StepInterrupted: the engine is ending.
        """
        started = perf_counter()
        for sequence_id in plan.released:
            self._states.pop(sequence_id, None)
        with torch.inference_mode():
            self._pool.prepare(plan)
            rows = self._run(plan.rows) if plan.rows else ()
        seconds = perf_counter() - started
        return StepResult(rows, seconds, waited_s=seconds)

    def collect(self, ticket: Ticket) -> StepResult:
        result: StepResult = ticket
        return result

    def overlaps(self, plan: StepPlan) -> bool:
        """Never: `submit` returns when all is done."""
        return False

    def decode_refusal(self, mode: DecodeMode, rows: Sequence[Row]) -> str | None:
        """Why steps do not overlap; a batch shares its pass whatever its rows ask for."""
        if mode == "pipelined":
            return f"{self._name} finishes a step before the next is planned"
        return None

    def tune(self, plan: StepPlan) -> None:
        """Make what choices only timing a decode step can make; `plan` is one."""

    def grow(self, group: int, blocks: int) -> int:
        return self._pool.grow(group, blocks)

    def close(self) -> None:
        """Let go of weights and K/V. Idempotent."""
        self._states.clear()
        self._pool.close()

    def _run(self, rows: Sequence[Row]) -> tuple[RowResult, ...]:
        states = [self._state(row) for row in rows]
        chunks = [
            Chunk(
                # A chained row whose sequence just failed has no token; any will do.
                (state.output_ids or [0])[-1:] if row.chained else row.tokens,
                row.offset,
                row.block_tables,
            )
            for row, state in zip(rows, states, strict=True)
        ]
        first, firsts = 0, []
        for row in rows:
            firsts.append(first)
            first += row.count
        wanting = [index for index, row in enumerate(rows) if row.wants_token]
        parts = [wanting[at : at + LOGITS_ROWS] for at in range(0, len(wanting), LOGITS_ROWS)]
        last = [firsts[index] + row.count - 1 for index, row in enumerate(rows)]
        first_rows = [last[index] for index in parts[0]] if parts else []
        draws = [states[index].draw for index in parts[0]] if parts else []
        self._program.forward(chunks, first_rows, draws)
        chosen: dict[int, Sampled | Exception] = {}
        for number, part in enumerate(parts):
            if number > 0:
                draws = [states[index].draw for index in part]
            found = self._choose(
                [last[index] for index in part], [states[index] for index in part], draws
            )
            chosen |= zip(part, found, strict=True)
        scores = [self._scores(row, start) for row, start in zip(rows, firsts, strict=True)]
        return tuple(
            row_result(row, chosen.get(index), scores[index]) for index, row in enumerate(rows)
        )

    def _choose(
        self,
        rows: Sequence[int],
        states: Sequence[SamplingState],
        draws: Sequence[Draw | None],
    ) -> list[Sampled | Exception]:
        choices = self._program.choices(rows, draws)
        if choices is None:
            return self._sampler.sample(self._logits(rows), states)
        found: list[Sampled | Exception | None] = [
            None if draw is None else taken(*choice, state)
            for choice, state, draw in zip(choices, states, draws, strict=True)
        ]
        left = [index for index, each in enumerate(found) if each is None]
        if left:
            logits = self._logits(rows)
            if len(left) < len(rows):
                logits = logits[left]
            sampled = self._sampler.sample(logits, [states[index] for index in left])
            for index, each in zip(left, sampled, strict=True):
                found[index] = each
        return [each for each in found if each is not None]

    def _logits(self, rows: Sequence[int]) -> Tensor:
        return self._program.logits(rows)[:, : self._vocab_size]

    def _state(self, row: Row) -> SamplingState:
        state = self._states.get(row.sequence_id)
        if state is None:
            state = self._states[row.sequence_id] = SamplingState(row.sampling, self._vocab_size)
        return state

    def _scores(self, row: Row, start: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the prompt tokens that follow the row's, in bounded slices."""
        wanted = row.sampling.params.prompt_logprobs
        if wanted is None:
            return ()
        following = row.sampling.prompt_ids[row.offset + 1 : row.offset + row.count + 1]
        scores: list[TokenLogprob] = []
        for at in range(0, len(following), LOGITS_ROWS):
            part = following[at : at + LOGITS_ROWS]
            numbers = range(start + at, start + at + len(part))
            scores += prompt_logprobs(self._logits(numbers), part, wanted)
        return tuple(scores)


class StepTimes:
    """How long steps take that overlap."""

    def __init__(self) -> None:
        self._ended = 0.0

    def since(self, started: float) -> float:
        """Seconds up to now from a step's submission, or from the end of the one before."""
        now = perf_counter()
        seconds = now - max(started, self._ended)
        self._ended = now
        return seconds


def taken(token: int, logit: float, state: SamplingState) -> Sampled | Exception:
    """A token that a program chose, appended to its sequence, or why it is none."""
    if not math.isfinite(logit):
        return sick_logits(logit)
    state.append(token)
    return Sampled(token)


def row_result(
    row: Row, chosen: Sampled | Exception | None, scores: tuple[TokenLogprob, ...]
) -> RowResult:
    """What came of a row, whatever chose its token."""
    if isinstance(chosen, Exception):
        return RowResult(row.sequence_id, row.epoch, error=chosen)
    if chosen is None:
        return RowResult(row.sequence_id, row.epoch, prompt_logprobs=scores)
    return RowResult(row.sequence_id, row.epoch, chosen.token, chosen.logprob, scores)
