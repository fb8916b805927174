"""What the scheduler and a runner say to each other. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from asyncllm.options import SamplingParams

DecodeMode = Literal["idle", "plain", "pipelined", "batched"]


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """What a runner needs to choose tokens for one sequence; the same object all its life.

    Attributes:
        params: resolved parameters (no `None` in a *checkpoint* field).
        seed: key of the counter-based random numbers.
        index: which of the request's `n` outputs this is; part of the key.
        prompt_ids: the prompt, for penalties and prompt log-probabilities.
        end_ids: ids that `min_tokens` keeps from being chosen.
    """

    params: SamplingParams
    seed: int
    index: int
    prompt_ids: Sequence[int]
    end_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: `count` tokens at positions `offset` to `offset + count - 1`.

    Attributes:
        sequence_id: never reused; the key of what a runner keeps for the sequence.
        epoch: grows with each preemption; a result of an older epoch is dropped.
        tokens: the `count` ids, or empty when `chained`.
        chained: `count` is 1 and the token is what the runner chose in the step before, which
            the host has not seen yet (one step ahead).
        block_tables: for each layer group the block ids; position p lies in entry
            `p // block_tokens` (modulo the table's length for a windowed group).
        wants_token: the chunk reaches the newest position, so a next token is to be chosen.
        output_count: output tokens before the one to be chosen.
        sampling: how it is chosen.
    """

    sequence_id: int
    epoch: int
    offset: int
    count: int
    tokens: Sequence[int]
    chained: bool
    block_tables: tuple[Sequence[int], ...]
    wants_token: bool
    output_count: int
    sampling: SamplingSpec


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block of one layer group (copy on write)."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Move a block of one layer group to (`saves`) or from (`loads`) a staging slot."""

    group: int
    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: block operations in the order saves, copies, loads; then every row, once."""

    rows: tuple[Row, ...]
    saves: tuple[BlockTransfer, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockTransfer, ...] = ()
    released: tuple[int, ...] = ()  # sequences that ended since the plan before
    decode_mode: DecodeMode = "plain"
    decode_mode_reason: str = ""

    @property
    def prompt_rows(self) -> int:
        """Tokens of rows that advance a prompt, over all requests."""
        return sum(row.count for row in self.rows if not is_decode(row))


def is_decode(row: Row) -> bool:
    """Whether the row continues an output rather than a prompt (or a recomputed prefix)."""
    return row.count == 1 and row.wants_token and row.output_count > 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token and of the most likely ones at its position (natural log)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What came of one row; `error` fails that request alone."""

    sequence_id: int
    epoch: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # for the tokens that follow each of the row's
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's rows, and what was measured.

    Attributes:
        rows: results.
        model_s: seconds that the step took.
        launch_failures: kernels that failed and were replaced.
        waited_s: seconds of the engine thread that went by while the step was computed: waiting for
            a device, or computing where the processor is the device.
    """

    rows: tuple[RowResult, ...]
    model_s: float
    launch_failures: tuple[str, ...] = ()
    waited_s: float = 0.0


class StepInterrupted(Exception):
    """A runner gave up a step because the engine is ending; nothing of the step counts."""


Ticket = Any


class Runner(Protocol):
    """Executes plans. Lives on the engine thread alone."""

    def overlaps(self, plan: StepPlan) -> bool:
        """Whether the host has time, once a step is submitted, to read the one before."""

    def decode_refusal(self, mode: DecodeMode, rows: Sequence[Row]) -> str | None:
        """Why it does not serve a step of these rows in this form; `None`: it does.

        Args:
            mode: `"pipelined"` or `"batched"`.
            rows: all of the step's.
        """

    def submit(self, plan: StepPlan) -> Ticket:
        """Queue a step. Plain backends do the work here."""

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a submitted step's results; tickets are collected in order."""

    def tune(self, plan: StepPlan) -> None:
        """Make what choices only timing can make, at load; `plan` is a decode step."""

    def grow(self, group: int, blocks: int) -> int:
        """Make room for this many more blocks of a group; returns how many were granted."""

    def close(self) -> None:
        """Free everything. Idempotent."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table: all unwindowed ones, or all of one window size.

    Attributes:
        window: tokens a query sees, itself included; `None`: all.
        layers: their indices.
        block_bytes: bytes of K and V of one block over all the group's layers.
        capacity: blocks the pool may ever hold.
    """

    window: int | None
    layers: tuple[int, ...]
    block_bytes: int
    capacity: int = field(default=0)
