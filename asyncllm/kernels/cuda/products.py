"""Products of up to 16 rows of activations: bound by how fast weights come from memory.

A program owns a few whole rows of the weight, its warps side by side along them, a thread to a
sub-block of 32 columns. Weights of the first steps are all asked for before anything is waited
for; long rows go on in a loop that stays two steps ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cuda.spelling import (
    EMULATED,
    EXPONENT,
    FLOAT16,
    SUPER,
    await_inputs,
    depend,
    dots,
    first_half,
    form_of,
    load_part,
    power,
    quarters,
    second_half,
    spell,
)
from asyncllm.kernels.cuda.weights import DeviceWeight

Config = tuple[int, int]
"""Warps of a program, rows of the weight that it owns."""

QuantisedRows = tuple[Tensor, Tensor, Tensor]
"""int32 [M, 2, K / 8], float32 [M, K / 32], int32 [M, K / 32]: bytes, scales, sums of 16."""

MOST_ROWS: Final = 16

# Steps of a program times its rows that are asked for at once: what registers hold.
_IN_FLIGHT: Final = 8


@triton.jit
def _stacked(values, COUNT: tl.constexpr, S: tl.constexpr):
    """COUNT, a power of 2, tensors [S] as one [S, COUNT]."""
    for level in tl.static_range(5):
        if COUNT >> level > 1:
            paired = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                paired = paired + (tl.join(values[i], values[i + (COUNT >> (level + 1))]),)
            values = paired
    return tl.reshape(values[0], [S, COUNT])


@triton.jit
def _sums(values, COUNT: tl.constexpr, S: tl.constexpr):
    """The sums of COUNT tensors [S], in chunks that the registers hold, [COUNT padded]."""
    return tl.sum(_stacked(values, COUNT, S), 0)


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    if GELU:
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * z)))
    else:
        return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _dot(
    codes,
    part,
    x,
    scale,
    sums_low,
    sums_high,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    SCALE: tl.constexpr,
    EMU: tl.constexpr,
):
    """What each sub-block adds to the product of one row by one row."""
    low, high = dots(codes, x, BITS, TABLE, EMU)
    if SCALE == SUPER:
        s = part[PARTS - 2].to(tl.int32)
        d = part[PARTS - 1]
        if GROUP == 16:
            if OFFSET > 0:
                low -= OFFSET * sums_low
                high -= OFFSET * sums_high
            if MINIMUM:
                i = (s & 255) * low + ((s >> 8) & 255) * high
                least = ((s >> 16) & 255) * sums_low + ((s >> 24) & 255) * sums_high
            else:
                i = ((s << 24) >> 24) * low + (s >> 8) * high
        elif MINIMUM:
            i = (s & 255) * (low + high)
            least = ((s >> 8) & 255) * (sums_low + sums_high)
        else:
            i = s * (low + high)
        if MINIMUM:
            value = first_half(d) * i.to(tl.float32) - second_half(d) * least.to(tl.float32)
        else:
            value = d.to(tl.float32) * i.to(tl.float32)
    else:
        d = part[PARTS - 1]
        i = low + high
        if OFFSET > 0:
            i -= OFFSET * (sums_low + sums_high)
        if SCALE == EXPONENT:
            value = power(d.to(tl.int32)) * i.to(tl.float32)
        elif MINIMUM:
            sums = (sums_low + sums_high).to(tl.float32)
            value = first_half(d) * i.to(tl.float32) + second_half(d) * sums
        else:
            value = d.to(tl.float32) * i.to(tl.float32)
    return scale * value


@triton.jit
def _few_rows(
    codes,
    upper,
    scales,
    supers,
    codes_up,
    upper_up,
    scales_up,
    supers_up,
    xq,
    xd,
    xs,
    residual,
    bias,
    out,
    N,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    AHEAD: tl.constexpr,
    GLU: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
    EMU: tl.constexpr,
):
    """R rows of the weight (of both weights, with GLU) by M rows of activations."""
    SUBS: tl.constexpr = K // 32
    S: tl.constexpr = 32 * W
    STEPS: tl.constexpr = (SUBS + S - 1) // S
    # A step beyond the last is asked for where a loop runs ahead, and must find nothing.
    MASKED: tl.constexpr = SUBS % S != 0 or STEPS > AHEAD
    ROWS: tl.constexpr = 2 * R if GLU else R
    depend(PDL)
    row0 = tl.program_id(0) * R
    parts = ()
    for step in tl.static_range(AHEAD):
        for r in tl.static_range(ROWS):
            # Rows beyond the last are the last one again, and not stored.
            row = tl.minimum(row0 + r % R, N - 1).to(tl.int64)
            if r < R:
                parts = parts + load_part(
                    codes, upper, scales, supers, row, step, SUBS, S, MASKED, BITS, SCALE
                )
            else:
                parts = parts + load_part(
                    codes_up, upper_up, scales_up, supers_up, row, step, SUBS, S, MASKED, BITS, SCALE
                )
    await_inputs(PDL)
    sums = ()
    for _ in tl.static_range(M * ROWS):
        sums = sums + (tl.zeros([S], tl.float32),)
    if STEPS <= AHEAD:
        for step in tl.static_range(STEPS):
            sums = _step(
                parts[step * ROWS * PARTS : (step + 1) * ROWS * PARTS],
                *(sums, xq, xd, xs, step, SUBS, S, M, ROWS, SUBS % S != 0),
                *(PARTS, BITS, OFFSET, TABLE, GROUP, MINIMUM, SCALE, EMU),
            )
    else:
        for step in range(STEPS):
            for r in tl.static_range(ROWS):
                row = tl.minimum(row0 + r % R, N - 1).to(tl.int64)
                if r < R:
                    parts = parts + load_part(
                        *(codes, upper, scales, supers),
                        *(row, step + AHEAD, SUBS, S, MASKED, BITS, SCALE),
                    )
                else:
                    parts = parts + load_part(
                        *(codes_up, upper_up, scales_up, supers_up),
                        *(row, step + AHEAD, SUBS, S, MASKED, BITS, SCALE),
                    )
            sums = _step(
                parts[: ROWS * PARTS],
                *(sums, xq, xd, xs, step, SUBS, S, M, ROWS, SUBS % S != 0),
                *(PARTS, BITS, OFFSET, TABLE, GROUP, MINIMUM, SCALE, EMU),
            )
            parts = parts[ROWS * PARTS :]
    _finish(
        *(sums, residual, bias, out, row0, N, residual_stride, out_stride),
        *(M, R, S, GLU, GELU, RESIDUAL, BIAS),
    )
