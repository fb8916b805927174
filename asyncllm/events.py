"""What a request gives back: public results, and the events the engine thread posts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability.

    Attributes:
        token_id: the token.
        text: its own text; bytes that are no whole character show as U+FFFD.
        logprob: natural logarithm of its probability before temperature and filters.
        top: the most likely tokens at the position, most likely first; as many as asked for.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated, over all `n` outputs, end tokens included.
        cached_tokens: prompt tokens whose K/V was reused instead of computed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a request, from the moment it was made.

    Attributes:
        queued_s: until it was admitted, and had what it reuses of the block store.
        prefill_s: from admission until its first token.
        first_token_s: until its first token; `None` if none came.
        total_s: until it ended.
    """

    queued_s: float
    prefill_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's `n` outputs.

    Attributes:
        index: which of `n`.
        text: its whole text.
        token_ids: its tokens, the end token included if one ended it.
        finish_reason: `"stop"`, `"length"` or `"cancelled"`.
        stop: the string or id that ended it, if one did.
        logprobs: one per token, if asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `text` to `logprobs` are those of `choices[0]`.

    Attributes:
        request_id: as given to `generate`, or made by it.
        text: the whole text.
        token_ids: its tokens, the end token included if one ended it.
        finish_reason: `"stop"`, `"length"` or `"cancelled"`.
        stop: the string or id that ended it, if one did.
        logprobs: one per token, if asked for.
        prompt_logprobs: one per prompt token (`None` for the first), if asked for.
        usage: token counts.
        timings: seconds.
        choices: all `n` outputs.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: tuple[Logprob, ...] | None
    prompt_logprobs: tuple[Logprob | None, ...] | None
    usage: Usage
    timings: Timings
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What arrived since the chunk before, of one output.

    Attributes:
        text: valid Unicode; joined over the chunks of one index it is the choice's text.
        token_ids: the tokens; text may lag behind them while a character or stop string is open.
        logprobs: one per token, if asked for.
        index: which of `n`.
        finish_reason: `None` until the output's last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None
    index: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Delta:
    """Posted by the engine thread: one output sequence's news of one step."""

    key: int
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Posted by the engine thread: a request ended, all its sequences with it."""

    key: int
    cached_tokens: int = 0
    queued_s: float = 0.0
    first_token_s: float | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    error: BaseException | None = None


Event = Delta | Done
