"""`PlainRunner`: executes plans with the plain program, all rows in one pass over the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.model.program import Chunk, PlainProgram
from asyncllm.runner.threads import set_threads
from asyncllm.sampling.sampler import Sampled, Sampler, SamplingState, prompt_logprobs
from asyncllm.scheduler.step import (
    DecodeMode,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool
    from asyncllm.model.causal_lm import CausalLM

# A pass of up to so many rows is made of operations so small that threads may cost more than they
# give: dearly where another process holds a core they wait for.
FEW_ROWS: Final = 16
WORTH_THREADS: Final = 0.75  # of one thread's time: less would not be worth that risk

# Rows of logits made at a time; it bounds their buffer, whatever is asked for.
LOGITS_ROWS: Final = 32


class PlainRunner:
    """The floor: every model, every format, no compilation. The work is done in `submit`.

    Args:
        model: bound weights.
        pool: where K and V are; closed with the runner.
        vocab_size: tokens that may be chosen; the embedding may have more rows, as padding.
        max_rows: rows of a step at most, over all sequences.
        threads: CPU threads of a pass. The bits of a result do not depend on them.
        should_stop: asked between layers; when it says so the step ends with `StepInterrupted`.
    """

    one_step_ahead = False

    def __init__(
        self,
        model: CausalLM,
        pool: KvPool,
        *,
        vocab_size: int,
        max_rows: int,
        threads: int = 1,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.threads = threads
        self.few_rows_threads = threads
        self.program = PlainProgram(
            model, pool, max_rows=max_rows, max_logits=LOGITS_ROWS, should_stop=should_stop
        )
        self.decode_refusals: dict[DecodeMode, str] = {
            "pipelined": "the plain runner finishes a step before the next is planned"
        }
        self._pool = pool
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size)
        self._states: dict[int, SamplingState] = {}

    def submit(self, plan: StepPlan) -> StepResult:
        """Do the step; the ticket is its result.

        Raises:
            StepInterrupted: the engine is ending.
        """
        started = perf_counter()
        for sequence_id in plan.released:
            self._states.pop(sequence_id, None)
        few = sum(row.count for row in plan.rows) <= FEW_ROWS
        set_threads(self.few_rows_threads if few else self.threads)
        with torch.inference_mode():
            for copy in plan.copies:
                self._pool.copy(copy.group, copy.source, copy.target)
            rows = self._run(plan.rows) if plan.rows else ()
        return StepResult(rows, perf_counter() - started)

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def tune(self, plan: StepPlan) -> None:
        """Choose the threads of passes with few rows, by timing a decode step again and again."""
        if self.threads == 1:
            return
        seconds: dict[int, float] = {}
        for _ in range(2):
            for threads in (1, self.threads):
                self.few_rows_threads = threads
                taken = self.submit(plan).model_s
                seconds[threads] = min(seconds.get(threads, taken), taken)
        gains = seconds[self.threads] < WORTH_THREADS * seconds[1]
        self.few_rows_threads = self.threads if gains else 1

    def grow(self, group: int, blocks: int) -> int:
        return self._pool.grow(group, blocks)

    def close(self) -> None:
        """Let go of weights and K/V. Idempotent."""
        self._states.clear()
        self._pool.close()

    def _run(self, rows: Sequence[Row]) -> tuple[RowResult, ...]:
        states = [self._state(row) for row in rows]
        self.program.forward(
            [
                Chunk(
                    # A chained row whose sequence just failed has no token; any will do.
                    (state.output_ids or [0])[-1:] if row.chained else row.tokens,
                    row.offset,
                    row.block_tables,
                )
                for row, state in zip(rows, states, strict=True)
            ]
        )
        first, firsts = 0, []
        for row in rows:
            firsts.append(first)
            first += row.count
        scores = [self._scores(row, start) for row, start in zip(rows, firsts, strict=True)]
        wanting = [index for index, row in enumerate(rows) if row.wants_token]
        chosen: dict[int, Sampled | Exception] = {}
        for start in range(0, len(wanting), LOGITS_ROWS):
            part = wanting[start : start + LOGITS_ROWS]
            last = [firsts[index] + rows[index].count - 1 for index in part]
            logits = self.program.logits(last)[:, : self._vocab_size]
            found = self._sampler.sample(logits, [states[index] for index in part])
            chosen |= zip(part, found, strict=True)
        return tuple(
            _result(row, chosen.get(index), scores[index]) for index, row in enumerate(rows)
        )

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
            logits = self.program.logits(numbers)[:, : self._vocab_size]
            scores += prompt_logprobs(logits, part, wanted)
        return tuple(scores)


def _result(
    row: Row, chosen: Sampled | Exception | None, scores: tuple[TokenLogprob, ...]
) -> RowResult:
    if isinstance(chosen, Exception):
        return RowResult(row.sequence_id, row.epoch, error=chosen)
    if chosen is None:
        return RowResult(row.sequence_id, row.epoch, prompt_logprobs=scores)
    return RowResult(row.sequence_id, row.epoch, chosen.token, chosen.logprob, scores)
