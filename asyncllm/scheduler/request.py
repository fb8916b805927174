"""A request and its sequences: what was asked for, how far each output has come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Tokens
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from asyncllm.events import FinishReason
from asyncllm.kv.block_pool import InvariantError
from asyncllm.options import SamplingParams
from asyncllm.scheduler.step import Row, RowResult, SamplingSpec, TokenLogprob

if TYPE_CHECKING:
    from asyncllm.kv.blocks import SequenceBlocks
    from asyncllm.kv.prefix import Chain

QueueKey = tuple[int, int, int, int]

_sequence_ids = itertools.count()


class State(Enum):
    """Where a sequence stands; the last three are ends."""

    WAITING = auto()
    ADOPTING = auto()
    PREFILLING = auto()
    DECODING = auto()
    PREEMPTED = auto()
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()


ENDED = frozenset({State.FINISHED, State.CANCELLED, State.FAILED})


class Request:
    """One arrival: a prompt and `params.n` sequences that continue it.

    Args:
        request_id: the caller's name for it.
        prompt_ids: token ids, at least one.
        params: resolved sampling parameters.
        seed: of its random numbers.
        end_ids: end-of-generation ids of the model.
        bad_words_ids: token sequences that must not appear.
        priority: lower goes first and is preempted last.
        cache_salt: prefixes are shared only under equal salts.
        prefix_cache: whether it may use prefixes of others and leave its own to them.

    Attributes:
        sequences: its outputs, `sequences[i].index == i`.
        arrival: position in the order of arrivals, set by `Scheduler.add`; -1 before.
        scored: prompt tokens whose log-probabilities were emitted, the first one included.
        queued, running: how many of its sequences wait for admission, and run.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: Tokens[int],
        params: SamplingParams,
        *,
        seed: int,
        end_ids: frozenset[int],
        bad_words_ids: tuple[tuple[int, ...], ...] = (),
        priority: int = 0,
        cache_salt: bytes = b"",
        prefix_cache: bool = True,
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.end_ids |= end_ids
        self.priority = priority
        self.cache_salt = cache_salt
        self.prefix_cache = prefix_cache
        self.arrival = -1
        self.scored = 1
        self.queued = self.running = 0
        self.sequences = tuple(
            Sequence(
                self,
                SamplingSpec(params, seed, index, self.prompt_ids, self.end_ids, bad_words_ids),
            )
            for index in range(params.n)
        )

    @property
    def done(self) -> bool:
        """Whether every sequence ended."""
        return all(sequence.state in ENDED for sequence in self.sequences)

    @property
    def waits(self) -> bool:
        """Whether it waits for admission and nothing of it runs."""
        return self.queued > 0 and self.running == 0

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.params.prompt_logprobs is not None and self.scored < len(self.prompt_ids)

    def new_scores(self, row: Row, result: RowResult) -> tuple[TokenLogprob, ...]:
        """Prompt log-probabilities not emitted yet: a recomputed chunk brings them again."""
        scores = result.prompt_logprobs[max(0, self.scored - row.offset - 1) :]
        scores = scores[: len(self.prompt_ids) - self.scored]
        self.scored += len(scores)
        return scores


class Sequence:
    """One output of a request. The scheduler alone changes it, `text` apart.

    Attributes:
        sequence_id: unique in the process, never reused.
        request: whose output it is.
        index: which of the request's `n`.
        spec: how its tokens are chosen.
        state: see `State`.
        epoch: grows with each preemption; results of older epochs are dropped.
        prompt_tokens: how many the prompt has.
        output_ids: tokens so far.
        finish_reason: `"stop"`, `"length"` or `"cancelled"` once it ended, unless it failed.
        stop: the string or token id that ended it.
        error: why it failed.
        cached_tokens: prompt tokens reused at its first admission.
        admitted_at: `time.perf_counter()` when it could first run: admitted, its prefix adopted.
        first_token_at: the same of its first token.
        text: the engine thread's text stream; the scheduler never looks.
        limit: prompt and output tokens at which it ends with `"length"`.
        submitted: tokens whose K/V was computed or is being computed by a step.
        committed: tokens whose K/V was computed by a step that was committed.
        tokens_in_flight: tokens being chosen by steps that are not committed yet.
        blocks: what it holds of the cache while it runs.
        chain: its prefixes; `None` if it takes no part in prefix reuse.
        failed_adoptions: how often what it was to adopt turned out not to be there.
        queue_key: its place among the waiting.
    """

    def __init__(self, request: Request, spec: SamplingSpec) -> None:
        self.sequence_id = next(_sequence_ids)
        self.request = request
        self.index = spec.index
        self.spec = spec
        self.state = State.WAITING
        self.epoch = 0
        self.prompt_tokens = len(request.prompt_ids)
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None
        self.error: Exception | None = None
        self.cached_tokens = 0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.text: Any = None
        self.limit = 0
        self.submitted = 0
        self.committed = 0
        self.tokens_in_flight = 0
        self.blocks: SequenceBlocks | None = None
        self.chain: Chain | None = None
        self.failed_adoptions = 0
        self.queue_key: QueueKey = (0, 0, 0, 0)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_running(self) -> bool:
        """Whether it holds blocks."""
        state = self.state
        return state is State.PREFILLING or state is State.DECODING or state is State.ADOPTING

    @property
    def length(self) -> int:
        """Prompt and output tokens that the host knows."""
        return self.prompt_tokens + len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Tokens that a step could advance now, one that is still being chosen included."""
        return self.length + self.tokens_in_flight - self.submitted

    @property
    def can_advance(self) -> bool:
        """Whether another step makes sense: its limit is not reached by what is in flight."""
        adopting = self.state is State.ADOPTING
        return not adopting and self.length + self.tokens_in_flight < self.limit

    @property
    def decodes_next(self) -> bool:
        """Whether its next row continues the output by one token."""
        return self.remaining == 1 and len(self.output_ids) + self.tokens_in_flight > 0

    @property
    def age_key(self) -> tuple[int, int, int]:
        """Smallest for the one that is served first, largest for the victim of a preemption."""
        return self.request.priority, self.request.arrival, self.index

    def ends_with(self, token: int) -> bool:
        """Whether committing this token now would end the sequence by an end id or stop id."""
        return (
            token in self.request.end_ids and len(self.output_ids) >= self.request.params.min_tokens
        )

    def tokens(self, start: int, stop: int) -> Tokens[int]:
        """Known ids at positions `start` to `stop - 1`."""
        prompt = self.request.prompt_ids
        size = len(prompt)
        if stop <= size:
            return prompt[start:stop]
        if start >= size:
            return self.output_ids[start - size : stop - size]
        return (*prompt[start:], *self.output_ids[: stop - size])

    def next_row(self, count: int) -> Row:
        """Its next `count` tokens as a row of a step, which counts as submitted from now on."""
        if self.blocks is None:
            raise InvariantError(f"sequence {self.sequence_id} is planned without blocks")
        offset = self.submitted
        chained = offset == self.length
        wants_token = count == self.remaining
        row = Row(
            self.sequence_id,
            self.epoch,
            offset,
            count,
            () if chained else self.tokens(offset, offset + count),
            chained,
            self.blocks.snapshot(),
            wants_token,
            len(self.output_ids) + self.tokens_in_flight,
            self.spec,
        )
        self.submitted += count
        self.tokens_in_flight += wants_token
        return row
