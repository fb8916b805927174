"""`CpuRunner`: decoding steps that are computed in the background, one ahead of what was read.

While the team's threads compute a step, the engine thread reads, words and posts the one before and
plans the next, which the threads then begin without waiting for Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

from asyncllm.model.program import Chunk
from asyncllm.runner.cpu_step import CpuProgram
from asyncllm.runner.runner import LOGITS_ROWS, StepRunner, StepTimes, row_result, taken
from asyncllm.sampling.sampler import Sampled, SamplingState
from asyncllm.scheduler.step import DecodeMode, Row, StepPlan, StepResult, Ticket

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool

# Longer steps are not run ahead: the host's share of them is little, and whoever arrives or ends
# meanwhile would wait for one step more.
AHEAD_BELOW_S: Final = 0.010


@dataclass(slots=True)
class _Ahead:
    """A step in the background.

    Attributes:
        rows: of the plan.
        states: of its sequences, which may have ended since.
        begun: what the program gave for it.
        started: when it was submitted.
        waited_s: how long the host waited for it.
        chosen: once it is finished.
    """

    rows: Sequence[Row]
    states: list[SamplingState]
    begun: tuple[int, int]
    started: float
    waited_s: float = 0.0
    chosen: list[Sampled | Exception] | None = None


class CpuRunner(StepRunner):
    """Runs a `CpuProgram`.

    Args:
        program: closed with the runner.
        pool: likewise.
        vocab_size: tokens that may be chosen.
    """

    def __init__(self, program: CpuProgram, pool: KvPool, *, vocab_size: int) -> None:
        super().__init__(program, pool, vocab_size=vocab_size, name="the CPU runner")
        self.program = program
        self._outstanding: deque[_Ahead] = deque()
        self._times = StepTimes()
        self._decode_s = 0.0  # what the last decoding step took

    def overlaps(self, plan: StepPlan) -> bool:
        """Whether the step runs in the background."""
        moves = plan.copies or plan.saves or plan.loads
        return not moves and bool(plan.rows) and self._ahead_refusal(plan.rows) is None

    def decode_refusal(self, mode: DecodeMode, rows: Sequence[Row]) -> str | None:
        """Why steps do not overlap; a batch shares its pass whatever its rows ask for."""
        return self._ahead_refusal(rows) if mode == "pipelined" else None

    def submit(self, plan: StepPlan) -> Ticket:
        """Do the step, or begin it if it overlaps."""
        if self.overlaps(plan):
            return self._begin(plan)
        while self._outstanding:
            self._finish(self._outstanding[0])
        result = self.run(plan)
        if plan.rows and plan.prompt_rows == 0:
            self._decode_s = result.model_s
        return result

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step's tokens."""
        if not isinstance(ticket, _Ahead):
            return super().collect(ticket)
        chosen = self._finish(ticket)
        self._decode_s = self._times.since(ticket.started)
        return StepResult(
            tuple(row_result(row, each, ()) for row, each in zip(ticket.rows, chosen, strict=True)),
            self._decode_s,
            waited_s=ticket.waited_s,
        )

    def close(self) -> None:
        """End the threads, let go of weights and K/V. Idempotent."""
        self.program.close()
        self._outstanding.clear()
        super().close()

    def _ahead_refusal(self, rows: Sequence[Row]) -> str | None:
        if not self.program.in_background:
            return "the CPU runner has no thread of its own"
        if self._decode_s > AHEAD_BELOW_S:
            return "a step takes so long that the host's share of it is little"
        if len(rows) > LOGITS_ROWS:
            return f"more than {LOGITS_ROWS} sequences share a step"
        for row in rows:
            if row.count > 1 or not row.wants_token:
                return "a prompt chunk shares the step"
            state = self._state(row)
            reason = state.host_reason
            if reason is None and state.edits_after(row.output_count):
                reason = "it has penalties, biases or min_tokens"
            if reason is None and row.sampling.params.prompt_logprobs is not None:
                reason = "it wants prompt_logprobs"
            if reason is not None:
                return f"the host chooses the tokens of a sequence: {reason}"
        return None

    def _begin(self, plan: StepPlan) -> _Ahead:
        started = perf_counter()
        for sequence_id in plan.released:
            self._states.pop(sequence_id, None)
        rows = plan.rows
        # Only if the step under way has the same rows does it leave the tokens where they are read.
        if self._outstanding and not _continues(rows, self._outstanding[-1].rows):
            while self._outstanding:
                self._finish(self._outstanding[0])
        known = not self._outstanding
        states = [self._state(row) for row in rows]
        chunks, draws = [], []
        for row, state in zip(rows, states, strict=True):
            tokens = row.tokens
            if row.chained:
                # One whose sequence just failed has no token; any will do.
                tokens = (state.output_ids or [0])[-1:] if known else (-1,)
            chunks.append(Chunk(tokens, row.offset, row.block_tables))
            draw = state.draw_after(row.output_count)
            if draw is None:
                raise RuntimeError(f"sequence {row.sequence_id}: the host chooses its tokens")
            draws.append(draw)
        ticket = _Ahead(rows, states, self.program.begin(chunks, draws), started)
        self._outstanding.append(ticket)
        return ticket

    def _finish(self, ticket: _Ahead) -> list[Sampled | Exception]:
        """A step's tokens, waited for once; steps are finished in order."""
        if ticket.chosen is None:
            started = perf_counter()
            found = self.program.finish(ticket.begun, len(ticket.rows))
            ticket.waited_s = perf_counter() - started
            self._outstanding.popleft()
            ticket.chosen = [
                taken(*choice, state) for choice, state in zip(found, ticket.states, strict=True)
            ]
        return ticket.chosen


def _continues(rows: Sequence[Row], before: Sequence[Row]) -> bool:
    return len(rows) == len(before) and all(
        row.chained and (row.sequence_id, row.epoch) == (old.sequence_id, old.epoch)
        for row, old in zip(rows, before, strict=True)
    )
