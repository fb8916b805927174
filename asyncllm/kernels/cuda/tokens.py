"""What a step begins with and what it leaves: tokens stay on the device from one to the next.

A captured step finds the host's words in pinned memory that the device reads itself, at a place
that a counter on the device names, and leaves its tokens in such memory: nothing has to be copied
between two replays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from asyncllm.kernels.cuda.rows import launch_options

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _receive(
    ring, turn, fields, WORDS: tl.constexpr, PADDED: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    now = tl.load(turn)
    word = tl.arange(0, PADDED)
    values = tl.load(ring + now * WORDS + word, mask=word < WORDS, cache_modifier=".cv")
    tl.store(fields + word, values, mask=word < WORDS)
    tl.debug_barrier()
    tl.store(turn, (now + 1) % RING)


@triton.jit
def _begin(
    fresh, slots, last, tokens, COUNT: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, PADDED)
    inside = row < COUNT
    given = tl.load(fresh + row, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=-1)
    chosen = tl.load(last + slot, mask=inside & (slot >= 0) & (given < 0), other=0)
    tl.store(tokens + row, tl.where(given >= 0, given, tl.maximum(chosen, 0)), mask=inside)


@triton.jit
def _end(
    tokens, slots, last, results, turn, stride,
    COUNT: tl.constexpr, PADDED: tl.constexpr, RING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.arange(0, PADDED)
    slot = tl.load(slots + row, mask=row < COUNT, other=-1)
    token = tl.load(tokens + row, mask=row < COUNT, other=0)
    tl.store(last + slot, token, mask=(row < COUNT) & (slot >= 0))
    if results is not None:
        # The step that is under way has counted itself.
        place = (tl.load(turn) + (RING - 1)) % RING
        tl.store(results + place * stride + row, token, mask=row < COUNT)


def receive(ring: Tensor, turn: Tensor, fields: Tensor) -> None:
    """`fields = ring[turn]`, then the next entry's turn.

    Nothing that follows may begin before this has ended: it is no part of programmatic dependent
    launch.

    Args:
        ring: int32 [entries, words], in memory that the device can read, written by the host.
        turn: int32 [1].
        fields: int32 [words], written.
    """
    entries, words = ring.shape
    _receive[(1,)](
        ring, turn, fields, WORDS=words, PADDED=triton.next_power_of_2(words), RING=entries
    )


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


def remember(
    tokens: Tensor,
    slots: Tensor,
    last: Tensor,
    *,
    results: Tensor | None = None,
    turn: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """`last[slots] = tokens`, where a slot is not below 0; all int32.

    Args:
        tokens: int32 [M].
        slots: int32 [M].
        last: int32 [slots], written.
        results: int32 [entries, at least M], in memory that the host can read: the tokens also go
            to the entry of the step under way.
        turn: as in `receive`, with as many entries.
        pdl: programmatic dependent launch.
    """
    count = len(tokens)
    padded = triton.next_power_of_2(count)
    _end[(1,)](
        tokens, slots, last, results, turn, 0 if results is None else results.stride(0),
        COUNT=count, PADDED=padded, RING=1 if results is None else len(results), PDL=pdl,
        **launch_options(pdl),
    )  # fmt: skip
