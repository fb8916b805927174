"""What the sampler keeps of one output sequence, and what its parameters do to its logits."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from asyncllm.errors import RequestError
from asyncllm.sampling import philox
from asyncllm.sampling.filters import GREEDY_BELOW, Filter
from asyncllm.sampling.penalties import Penalties, penalised
from asyncllm.scheduler.step import SamplingSpec

_FLOAT32_MAX = 3.4028234663852886e38


# Above it, weights in float32 no longer tell logits apart.
HOTTEST_DRAW: Final = 1e4


class Draw(NamedTuple):
    """How one token is chosen.

    Attributes:
        temperature: 0 takes the most likely.
        top_k: the vocabulary's size is off.
        top_p: 1 and more is off.
        min_p: 0 is off.
        uniform: the random number.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


GREEDY: Final = Draw(0.0, 0, 1.0, 0.0, 0.0)


class SamplingState:
    """One output sequence.

    Attributes:
        spec: what was asked for.
        output_ids: its output tokens so far. Their number is the position of the next one's random
            number, so a state rebuilt by appending the same tokens goes on with the same choices.
        fault: why no token of this sequence can ever be chosen, if its parameters are at fault.
        greedy: whether the most likely token is taken.
        filter: how it is chosen otherwise.
        wants_logprobs: whether log-probabilities are asked for.
        ever_edits: whether `edit` changes the logits of any token.
    """

    def __init__(self, spec: SamplingSpec, vocab_size: int) -> None:
        params = spec.params
        self.spec = spec
        self.output_ids: list[int] = []
        self.fault = _fault(spec, vocab_size)
        self.filter = Filter.of(params, vocab_size)
        self.greedy = self.filter.temperature < GREEDY_BELOW
        self.wants_logprobs = params.logprobs is not None
        self._vocab_size = vocab_size
        self._penalised = penalised(params)
        self._penalties: Penalties | None = None  # made at first use, on the logits' device
        self._bias: tuple[Tensor, Tensor] | None = None
        self._end_ids = [token for token in spec.end_ids if 0 <= token < vocab_size]
        self._bad_words = [
            words for words in spec.bad_words_ids if words and 0 <= words[-1] < vocab_size
        ]
        self._always_edits = bool(
            self._penalised or params.logit_bias or params.logits_processors or self._bad_words
        )
        self.ever_edits = self._always_edits or params.min_tokens > 0

    @property
    def edits(self) -> bool:
        """Whether `edit` would change the next token's logits."""
        return self.edits_after(len(self.output_ids))

    def edits_after(self, outputs: int) -> bool:
        """Whether `edit` would change the logits of the token after `outputs` others."""
        return self._always_edits or outputs < self.spec.params.min_tokens

    @cached_property
    def host_reason(self) -> str | None:
        """Why only the sampler can choose this sequence's tokens, all its life.

        `None`: a program that draws, counts tokens and adds biases can do without it.
        """
        params = self.spec.params
        reasons = {
            "its parameters are at fault": self.fault is not None,
            "it has logits_processors": params.logits_processors,
            "it wants logprobs": self.wants_logprobs,
            "it has bad_words of several tokens": any(len(words) > 1 for words in self._bad_words),
            "it has typical_p": self.filter.typical_p < math.inf,
            f"its temperature is above {HOTTEST_DRAW:g}": self.filter.temperature > HOTTEST_DRAW,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @cached_property
    def biases(self) -> list[tuple[int, float]]:
        """What `edit` adds to logits, without processors: token ids and numbers in float32's range.

        First those that always hold, then -inf for each id that would end the output, which holds
        for the first `min_tokens` tokens.
        """
        pairs = self.spec.params.logit_bias or {}
        found = [(token, _held(value)) for token, value in pairs.items()]
        found += [(words[-1], -math.inf) for words in self._bad_words if len(words) == 1]
        if self.spec.params.min_tokens:
            found += [(token, -math.inf) for token in self._end_ids]
        return found

    def biases_after(self, outputs: int) -> int:
        """How many of `biases` hold for the token after `outputs` others."""
        min_tokens = self.spec.params.min_tokens
        expired = bool(min_tokens) and outputs >= min_tokens
        return len(self.biases) - (len(self._end_ids) if expired else 0)

    @property
    def draw(self) -> Draw | None:
        """How the next token is chosen, where a program may do that; otherwise the sampler must."""
        return self.draw_after(len(self.output_ids))

    def draw_after(self, outputs: int) -> Draw | None:
        """How the token after `outputs` others is chosen, where a program may do that."""
        if self.edits_after(outputs) or self.host_reason is not None:
            return None
        if self.greedy:
            return GREEDY
        chosen = self.filter
        uniform = philox.uniform(self.spec.seed, outputs, self.spec.index)
        return Draw(chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, uniform)

    def append(self, token: int) -> None:
        """Add an output token; it counts for penalties from now on."""
        self.output_ids.append(token)
        if self._penalties is not None:
            with torch.inference_mode():
                self._penalties.count(token)

    def edit(self, row: Tensor) -> None:
        """Change the next token's logits as the parameters ask, in the order `Sampler` documents.

        Args:
            row: float32 [vocab], changed in place.

        Raises:
            RequestError: a callable of `logits_processors` failed or returned what it must not.
        """
        params = self.spec.params
        for number in range(len(params.logits_processors)):
            self._process(row, number)
        if params.logit_bias:
            ids, biases = self._bias_on(row.device)
            row.index_add_(0, ids, biases)
        if self._penalised:
            if self._penalties is None:
                self._penalties = Penalties(
                    params, self.spec.prompt_ids, self.output_ids, self._vocab_size, row.device
                )
            self._penalties.apply(row)
        banned = self._completing_bad_words()
        if len(self.output_ids) < params.min_tokens:
            banned += self._end_ids
        if banned:
            row[torch.tensor(banned, device=row.device)] = -math.inf

    def _process(self, row: Tensor, number: int) -> None:
        processor = self.spec.params.logits_processors[number]
        kind = getattr(processor, "__qualname__", type(processor).__name__)
        name = f"logits_processors[{number}] ({kind})"
        # Copies, so that whatever a callable keeps or changes is its own.
        try:
            result = processor([*self.spec.prompt_ids, *self.output_ids], row.clone())
            found = _unfit(result, row)
            if found is None:
                row.copy_(result.detach())
        except BaseException as cause:  # SystemExit and the like are this request's fault too
            try:
                what = f"{type(cause).__name__}: {cause}"
            except Exception:  # even its message may raise
                what = type(cause).__name__
            raise RequestError(f"{name} raised {what}") from cause
        if found is None:
            peak = float(row.amax())
            if math.isfinite(peak):
                return
            found = "only -inf" if peak == -math.inf else f"a logit that is {peak}"
        raise RequestError(
            f"{name} returned {found}; expected is a dense tensor [{self._vocab_size}] of "
            "torch.float32, each finite or -inf, not all -inf"
        )

    def _bias_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._bias is None:
            pairs = self.spec.params.logit_bias or {}
            values = [_held(value) for value in pairs.values()]
            self._bias = (
                torch.tensor(list(pairs), dtype=torch.int64, device=device),
                torch.tensor(values, dtype=torch.float32, device=device),
            )
        return self._bias

    def _completing_bad_words(self) -> list[int]:
        """Last tokens of the sequences whose other tokens the output ends with."""
        banned = []
        for *start, last in self._bad_words:
            if not start or self.output_ids[-len(start) :] == start:
                banned.append(last)
        return banned


def _held(bias: float) -> float:
    """In float32's range, -inf aside: an infinite sum would ban or fault rather than favour."""
    return bias if bias == -math.inf else max(-_FLOAT32_MAX, min(_FLOAT32_MAX, bias))


def _unfit(result: object, row: Tensor) -> str | None:
    if not isinstance(result, Tensor):
        return type(result).__name__
    unlike = result.shape != row.shape or result.dtype != row.dtype
    if unlike or result.layout != row.layout or result.is_meta:
        kind = f"{result.dtype}, {result.layout}, on {result.device}"
        return f"a tensor {list(result.shape)} of {kind}"
    return None


def _fault(spec: SamplingSpec, vocab_size: int) -> RequestError | None:
    places: tuple[tuple[str, Collection[int]], ...] = (
        ("logit_bias", spec.params.logit_bias or ()),
        ("stop_token_ids", spec.params.stop_token_ids),
        ("prompt", spec.prompt_ids),
    )
    for name, ids in places:
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < vocab_size:
                return RequestError(
                    f"{name}: token id {token} is not in the vocabulary; accepted are ids from 0 "
                    f"to {vocab_size - 1}"
                )
    return None
