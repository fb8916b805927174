"""From logits to tokens, for a whole batch at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.errors import RequestError
from asyncllm.sampling.filters import SLAB_ELEMENTS, choose, ranked
from asyncllm.sampling.philox import uniform
from asyncllm.sampling.state import SamplingState
from asyncllm.scheduler.step import TokenLogprob

__all__ = ["Sampled", "Sampler", "SamplingState", "prompt_logprobs", "sick_edits", "sick_logits"]

_BLOCK = 512  # logits under one partial maximum


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, and its log-probability if it was asked for."""

    token: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Chooses the next token of each sequence of a batch.

    The order of operations, as vLLM has it:

    1. log-probabilities, of the model's own logits;
    2. `logits_processors`, `logit_bias`, repetition, then presence and frequency penalties;
    3. `min_tokens` and `bad_words`, which rule tokens out (they come last, so nothing undoes them);
    4. greedy rows take the most likely token, the lowest id of equals;
    5. other rows: `temperature`, then `min_p`, `top_k`, `top_p`, `typical_p`, then the choice.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled | Exception]:
        """Choose a token for each row and append it to the row's state.

        Args:
            logits: float32 [n, vocab_size]; overwritten.
            states: n different ones.

        Returns:
            For each row what was chosen, or the `RequestError` that fails this row alone: its state
            stays as it was.

        Raises:
            ValueError: the logits have another shape or type.
        """
        expected = (len(states), self._vocab_size)
        if tuple(logits.shape) != expected or logits.dtype != torch.float32:
            raise ValueError(
                f"logits are {list(logits.shape)} of {logits.dtype}; "
                f"expected is {list(expected)} of torch.float32"
            )
        if not states:
            return []
        with torch.inference_mode():
            return self._sample(logits, states)

    def _sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled | Exception]:
        tokens, peaks = _most_likely(logits)
        faults: dict[int, Exception] = {}
        for row, (state, peak) in enumerate(zip(states, peaks, strict=True)):
            if state.fault is not None:
                faults[row] = state.fault
            elif not math.isfinite(peak):
                faults[row] = sick_logits(peak)

        telling = [i for i, state in enumerate(states) if state.wants_logprobs and i not in faults]
        raw = _rows(logits, telling).log_softmax(-1) if telling else None
        edited = []
        for row, state in enumerate(states):
            if row not in faults and state.edits:
                try:
                    state.edit(logits[row])
                    edited.append(row)
                except RequestError as fault:
                    faults[row] = fault
        changed = _most_likely(_rows(logits, edited)) if edited else ([], [])
        for row, token, peak in zip(edited, *changed, strict=True):
            tokens[row] = token
            if not math.isfinite(peak):
                faults[row] = sick_edits(peak)

        drawn = [i for i, state in enumerate(states) if i not in faults and not state.greedy]
        if drawn:
            chosen = choose(
                _rows(logits, drawn),
                [states[row].filter for row in drawn],
                [_uniform(states[row]) for row in drawn],
            )
            for row, token in zip(drawn, chosen, strict=True):
                tokens[row] = token

        logprobs: dict[int, TokenLogprob] = {}
        if raw is not None:
            counts = [states[row].spec.params.logprobs or 0 for row in telling]
            found = _logprobs(raw, [tokens[row] for row in telling], counts)
            logprobs = dict(zip(telling, found, strict=True))
        results: list[Sampled | Exception] = []
        for row, state in enumerate(states):
            if row in faults:
                results.append(faults[row])
            else:
                state.append(tokens[row])
                results.append(Sampled(tokens[row], logprobs.get(row)))
        return results


def sick_logits(peak: float) -> RequestError:
    """What fails a row whose largest logit is no finite number."""
    return RequestError(f"the model's logits are {_amiss(peak)}")


def sick_edits(peak: float) -> RequestError:
    """What fails a row whose largest logit is no finite number once its parameters changed them."""
    return RequestError(
        "logits_processors, logit_bias, penalties, min_tokens and bad_words together "
        f"leave logits that are {_amiss(peak)}"
    )


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of the tokens that follow each of a prompt's.

    Args:
        logits: float32 [rows, vocab], of the model itself.
        next_ids: the token that follows each row's.
        k: how many of the most likely tokens to tell as well; above the vocabulary's size, all.

    Returns:
        One per row.

    Raises:
        ValueError: not one token per row.
    """
    if len(logits) != len(next_ids):
        raise ValueError(f"{len(logits)} rows of logits, but {len(next_ids)} tokens to look up")
    size = _slab_rows(logits)
    found: list[TokenLogprob] = []
    with torch.inference_mode():
        for start in range(0, len(next_ids), size):
            part = slice(start, start + size)
            tokens = next_ids[part]
            found += _logprobs(logits[part].log_softmax(-1), tokens, [k] * len(tokens))
    return found


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, in rising order; without a copy if they are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _logprobs(values: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Of log-probabilities [n, vocab] each row's token's own, and as many of the largest."""
    found = []
    size = _slab_rows(values)
    for start in range(0, len(values), size):
        part, ids = values[start : start + size], torch.tensor(tokens[start : start + size])
        own = part.gather(1, ids.to(part.device)[:, None])[:, 0].tolist()
        top = ranked(part, min(max(counts), part.shape[1]))
        pairs = zip(top.tolist(), part.gather(1, top).tolist(), strict=True)
        found += [
            (value, tuple(zip(*pair, strict=True))) for value, pair in zip(own, pairs, strict=True)
        ]
    return [
        TokenLogprob(token, value, pairs[:count])
        for token, (value, pairs), count in zip(tokens, found, counts, strict=True)
    ]


def _slab_rows(logits: Tensor) -> int:
    """Rows to work on at once."""
    return max(1, SLAB_ELEMENTS // logits.shape[1])


def _most_likely(logits: Tensor) -> tuple[list[int], list[float]]:
    """Each row's most likely token, the lowest id of equals, and its logit.

    The logit tells a sick row: a maximum passes NaN on, and is -inf where all are.

    Maxima of blocks first and then a search in the best block alone: `amax` runs at memory's speed,
    `argmax` over everything several times slower.
    """
    vocab = logits.shape[1]
    whole = vocab // _BLOCK * _BLOCK
    parts = []
    if whole:
        parts.append(logits[:, :whole].view(len(logits), -1, _BLOCK).amax(-1))
    if whole < vocab:
        parts.append(logits[:, whole:].amax(-1, keepdim=True))
    first = torch.cat(parts, dim=1).argmax(-1, keepdim=True) * _BLOCK
    columns = (first + torch.arange(_BLOCK, device=logits.device)).clamp_(max=vocab - 1)
    block = logits.gather(1, columns)
    best = block.argmax(-1, keepdim=True)
    return (first + best)[:, 0].tolist(), block.gather(1, best)[:, 0].tolist()


def _uniform(state: SamplingState) -> float:
    return uniform(state.spec.seed, len(state.output_ids), state.spec.index)


def _amiss(peak: float) -> str:
    if peak == -math.inf:
        return "all -inf, so that no token is left to choose"
    return "not numbers (NaN)" if math.isnan(peak) else "infinite"
