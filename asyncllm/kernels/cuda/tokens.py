"""Tokens that stay on the device from one step to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _begin(fresh, slots, last, tokens, COUNT: tl.constexpr, PADDED: tl.constexpr):
    row = tl.arange(0, PADDED)
    inside = row < COUNT
    given = tl.load(fresh + row, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=-1)
    chosen = tl.load(last + slot, mask=inside & (slot >= 0) & (given < 0), other=0)
    tl.store(tokens + row, tl.where(given >= 0, given, tl.maximum(chosen, 0)), mask=inside)


@triton.jit
def _end(tokens, slots, last, COUNT: tl.constexpr, PADDED: tl.constexpr):
    row = tl.arange(0, PADDED)
    slot = tl.load(slots + row, mask=row < COUNT, other=-1)
    token = tl.load(tokens + row, mask=row < COUNT, other=0)
    tl.store(last + slot, token, mask=(row < COUNT) & (slot >= 0))


def first_tokens(fresh: Tensor, slots: Tensor, last: Tensor, tokens: Tensor) -> None:
    """The token of each row: the one that came with it, or the one its sequence chose last.

    Args:
        fresh: int32 [M]; below 0: none came.
        slots: int32 [M], the sequence of each row; below 0: only padding.
        last: int32 [slots].
        tokens: int32 [M], written.
    """
    count = len(tokens)
    padded = triton.next_power_of_2(count)
    _begin[(1,)](fresh, slots, last, tokens, COUNT=count, PADDED=padded)


def remember(tokens: Tensor, slots: Tensor, last: Tensor) -> None:
    """`last[slots] = tokens`, where a slot is not below 0; all int32."""
    count = len(tokens)
    padded = triton.next_power_of_2(count)
    _end[(1,)](tokens, slots, last, COUNT=count, PADDED=padded)
