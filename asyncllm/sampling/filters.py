"""Temperature, min_p, top_k, top_p and typical_p, and the random choice among what they leave.

All of it is done on whole batches in float64 and row by row independent: sums run along a row in a
fixed order (`cumsum`, where `sum` may split a row over threads), and ties are broken by token id.
So a row's choice does not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncllm.options import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures below this are greedy; they leave the peak alone with weight
CANDIDATES = (1 << 10, 1 << 14)  # tried in turn; only rows left with more are sorted as a whole
SLAB_ELEMENTS = 1 << 20  # of a batch worked on at once: bounds memory, and suits caches


@dataclass(frozen=True, slots=True)
class Filter:
    """One row's parameters, each a number that also says "off".

    Attributes:
        temperature: above 0.
        top_k: 1 to the vocabulary's size, which is off.
        top_p: infinity is off.
        min_p: 0 is off.
        typical_p: infinity is off.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float

    def off(self, vocab_size: int) -> bool:
        """Whether every token may be chosen."""
        return (self.top_k, self.top_p, self.min_p, self.typical_p) == (
            vocab_size,
            math.inf,
            0.0,
            math.inf,
        )

    def within(self, width: int, vocab_size: int) -> bool:
        """Whether it may leave tokens among the `width` most likely alone, before typical_p."""
        return (
            self.top_k <= width
            or self.min_p > 0.0
            or (self.top_k == vocab_size and self.top_p < math.inf)
        )

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Filter:
        """The filter that these parameters ask for."""
        top_k = params.top_k or 0
        top_p = 1.0 if params.top_p is None else params.top_p
        return cls(
            temperature=params.temperature or 0.0,
            top_k=top_k if 0 < top_k < vocab_size else vocab_size,
            top_p=top_p if top_p < 1.0 else math.inf,
            min_p=params.min_p or 0.0,
            typical_p=params.typical_p if params.typical_p < 1.0 else math.inf,
        )


def choose(logits: Tensor, filters: Sequence[Filter], uniforms: Sequence[float]) -> list[int]:
    """One token for each row.

    Filters apply in the order min_p, top_k, top_p, typical_p, each on what the one before left, its
    probabilities taken anew. Then the token is read off the cumulative distribution, in the
    vocabulary's order, at the row's uniform number.

    Args:
        logits: float32 [n, vocab], the largest of each row finite. Not changed.
        filters: one per row.
        uniforms: one number in [0, 1) per row.
    """
    vocab = logits.shape[1]
    table = torch.tensor(
        [
            (f.temperature, f.top_k, f.top_p, f.min_p, f.typical_p, u)
            for f, u in zip(filters, uniforms, strict=True)
        ],
        dtype=torch.float64,
        device=logits.device,
    )
    chosen = [0] * len(filters)
    for rows in _slabs([row for row, f in enumerate(filters) if f.off(vocab)], vocab):
        index = torch.tensor(rows, device=logits.device)
        values, numbers = logits[index], table[index]
        weights = _weights(values, values.amax(-1, keepdim=True), numbers[:, :1])
        for row, token in zip(rows, _draw(weights, numbers[:, 5:]).tolist(), strict=True):
            chosen[row] = token

    waiting = [row for row, f in enumerate(filters) if not f.off(vocab)]
    for width in (*(width for width in CANDIDATES if width < vocab), vocab):
        tried = [row for row in waiting if width == vocab or filters[row].within(width, vocab)]
        for rows in _slabs(tried, vocab):
            index = torch.tensor(rows, device=logits.device)
            among = [filters[row] for row in rows]
            tokens, settled = _choose_among(logits[index], table[index], among, width)
            for row, token, good in zip(rows, tokens.tolist(), settled.tolist(), strict=True):
                if good:
                    chosen[row] = token
                    waiting.remove(row)
    return chosen


def ranked(logits: Tensor, count: int) -> Tensor:
    """Ids of the most likely tokens, most likely first, equal ones by id.

    Args:
        logits: float32 [n, vocab] without NaN.
        count: how many, at most vocab.

    Returns:
        int64 [n, count].
    """
    # A float's bits, their lower 31 flipped below zero, order as the float does (after -0 + 0 = 0).
    # With the id subtracted every key is unique, so there is one answer however topk goes about it.
    bits = (logits + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((bits.to(torch.int64) << 32) - ids).topk(count, dim=-1).indices


def _slabs(rows: Sequence[int], vocab: int) -> Iterator[Sequence[int]]:
    size = max(1, SLAB_ELEMENTS // vocab)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _weights(values: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities relative to the most likely token's: float64, at most 1."""
    return ((values.to(torch.float64) - peaks.to(torch.float64)) / temperatures).exp_()


def _before(sums: Tensor) -> Tensor:
    """Running sums without each element's own share."""
    return pad(sums[:, :-1], (1, 0))


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The column at which the running sum first exceeds the row's uniform share of the total."""
    sums = weights.cumsum(-1)
    return torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)[:, 0]


def _choose_among(
    logits: Tensor, table: Tensor, filters: Sequence[Filter], width: int
) -> tuple[Tensor, Tensor]:
    """Choose among the `width` most likely tokens of each row.

    Returns:
        Tokens int64 [n], and bool [n]: whether the filters left none beyond `width`, without which
        the token means nothing.
    """
    vocab = logits.shape[1]
    temperature, top_k, top_p, min_p, typical_p, uniform = table[:, None].unbind(2)
    ids = ranked(logits, width)
    values = logits.gather(1, ids)
    weights = _weights(values, values[:, :1], temperature)
    sums = weights.cumsum(-1)

    rank = torch.arange(width, device=logits.device)
    kept = (rank < top_k) & (weights >= min_p)  # the first so many of a row, the rest not
    count = kept.sum(-1, keepdim=True)
    total = sums.gather(1, count - 1)
    settled = (count < width) | (top_k <= width) | (width == vocab)
    # With top_p alone the total has to come from all of the row, not only from its candidates.
    alone = [i for i, f in enumerate(filters) if f.top_k == vocab and f.min_p == 0.0]
    if alone and width < vocab:
        index = torch.tensor(alone, device=logits.device)
        whole = _weights(logits[index], values[index, :1], temperature[index])
        total[index] = whole.cumsum(-1)[:, -1:]
        settled[index] = sums[index, -1:] >= top_p[index] * total[index]
    kept &= _before(sums) < top_p * total

    if any(f.typical_p < math.inf for f in filters):
        kept &= _typical(torch.where(kept, weights, 0.0), typical_p)

    ids, order = ids.sort(dim=-1)
    slots = _draw(torch.where(kept, weights, 0.0).gather(1, order), uniform)
    return ids.gather(1, slots[:, None])[:, 0], settled[:, 0]


def _typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Which tokens locally typical sampling keeps (Meister et al., arXiv 2202.00666).

    Those whose information content is nearest to the distribution's entropy, as few as reach a
    probability of `typical_p`.
    """
    total = weights.cumsum(-1)[:, -1:]
    probabilities = weights / total
    information = -probabilities.log()
    shares = torch.where(probabilities > 0, probabilities * information, 0.0)
    entropy = shares.cumsum(-1)[:, -1:]
    order = (information - entropy).abs().argsort(dim=-1, stable=True)
    sums = probabilities.gather(1, order).cumsum(-1)
    near = _before(sums) < typical_p
    return torch.zeros_like(near).scatter_(1, order, near)
