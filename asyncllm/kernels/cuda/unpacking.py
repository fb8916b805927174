"""Weights to numbers: whole matrices for the vendor's products, single rows for embeddings.

A thread takes half a sub-block's low codes and as many high ones, eight columns each, so that it
writes 16 bytes at a time of float16; what is read and written is all that such a kernel takes time
for.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cuda.spelling import (
    SUPER,
    await_inputs,
    depend,
    form_of,
    group_scales,
    table_value,
)
from asyncllm.kernels.cuda.weights import DeviceWeight

_WARPS: Final = 4
_SUBS: Final = 16 * _WARPS
"""Sub-blocks at a time, eight columns of either half to a thread."""

_AT_ONCE: Final = 2
"""Such tiles to a program."""


@triton.jit
def _eight_columns(codes, codes_bytes, upper, row, sub, inside, SUBS, FORM):
    """Codes of the low and the high halves, int32 [S, 2, 8]; row and sub are [S, 1, 1]."""
    BITS: tl.constexpr = FORM[0]
    h = tl.arange(0, 2)[None, :, None]
    c = tl.arange(0, 8)[None, None, :]
    place = row * SUBS + sub
    # Where in a word the bits of column 8h + c are: word 2h + c // 4 of the half, byte c % 4.
    byte = (c % 4) * 8 + 0 * h
    j = 2 * h + c // 4
    if BITS == 8:
        at = codes_bytes + row * (SUBS * 32) + sub * 16 + h * 8 + c
        low = tl.load(at, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
        at += SUBS * 16
        high = tl.load(at, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    elif BITS < 4:
        pairs = codes + place * 2 + 0 * h
        low = (tl.load(pairs, mask=inside, other=0) >> (byte + 2 * j)) & 3
        high = (tl.load(pairs + 1, mask=inside, other=0) >> (byte + 2 * j)) & 3
    else:
        both = tl.load(codes_bytes + place * 16 + h * 8 + c, mask=inside, other=0).to(tl.int32)
        low = both & 15
        high = both >> 4
    if BITS == 6:
        pairs = upper + place * 2 + 0 * h
        low |= ((tl.load(pairs, mask=inside, other=0) >> (byte + 2 * j)) & 3) << 4
        high |= ((tl.load(pairs + 1, mask=inside, other=0) >> (byte + 2 * j)) & 3) << 4
    if BITS == 3 or BITS == 5:
        bits = tl.load(upper + place + 0 * h, mask=inside, other=0)
        low |= ((bits >> (byte + j)) & 1) << (BITS - 1)
        high |= ((bits >> (byte + 4 + j)) & 1) << (BITS - 1)
    return low, high


@triton.jit
def _values(codes, codes_bytes, upper, scales, supers, row, sub, inside, SUBS, FORM):
    """Weights of the low and the high halves, float32 [S, 2, 8]."""
    OFFSET: tl.constexpr = FORM[1]
    TABLE: tl.constexpr = FORM[2]
    SCALE: tl.constexpr = FORM[5]
    h = tl.arange(0, 2)[None, :, None]
    low, high = _eight_columns(codes, codes_bytes, upper, row, sub, inside, SUBS, FORM)
    scale = tl.load(scales + row * SUBS + sub + 0 * h, mask=inside, other=0)
    super_ = scale
    if SCALE == SUPER:
        super_ = tl.load(supers + row * (SUBS // 8) + sub // 8 + 0 * h, mask=inside, other=0)
    a, b, m, n = group_scales(scale, super_, FORM)
    if TABLE > 0:
        low = table_value(low, TABLE)
        high = table_value(high, TABLE)
    return a * (low - OFFSET).to(tl.float32) - m, b * (high - OFFSET).to(tl.float32) - n


@triton.jit
def _unpack(
    codes,
    codes_bytes,
    upper,
    scales,
    supers,
    out,
    TOTAL,
    out_stride,
    K: tl.constexpr,
    S: tl.constexpr,
    TILES: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOTAL sub-blocks of a whole weight, whatever rows they are of."""
    SUBS: tl.constexpr = K // 32
    depend(PDL)
    await_inputs(PDL)
    h = tl.arange(0, 2)[None, :, None]
    c = tl.arange(0, 8)[None, None, :]
    for tile in tl.static_range(TILES):
        first = (tl.program_id(0).to(tl.int64) * TILES + tile) * S
        place = first + tl.arange(0, S)[:, None, None]
        inside = place < TOTAL
        row = place // SUBS
        sub = place % SUBS
        low, high = _values(codes, codes_bytes, upper, scales, supers, row, sub, inside, SUBS, FORM)
        target = out + row * out_stride + sub * 32 + h * 8 + c
        tl.store(target, low.to(out.dtype.element_ty), mask=inside)
        tl.store(target + 16, high.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed(
    codes,
    codes_bytes,
    upper,
    scales,
    supers,
    tokens,
    out,
    scale,
    out_stride,
    K: tl.constexpr,
    S: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sub-blocks of the row that a token names."""
    SUBS: tl.constexpr = K // 32
    depend(PDL)
    await_inputs(PDL)
    h = tl.arange(0, 2)[None, :, None]
    c = tl.arange(0, 8)[None, None, :]
    sub = tl.program_id(1) * S + tl.arange(0, S)[:, None, None]
    inside = sub < SUBS
    row = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    low, high = _values(codes, codes_bytes, upper, scales, supers, row, sub, inside, SUBS, FORM)
    target = out + tl.program_id(0).to(tl.int64) * out_stride + sub * 32 + h * 8 + c
    tl.store(target, low * scale, mask=inside)
    tl.store(target + 16, high * scale, mask=inside)


@triton.jit
def _embed_float(
    values, tokens, out, scale, out_stride, K: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr
):
    depend(PDL)
    await_inputs(PDL)
    column = tl.program_id(1) * S + tl.arange(0, S)
    row = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    value = tl.load(values + row * K + column, mask=column < K, other=0).to(tl.float32)
    target = out + tl.program_id(0).to(tl.int64) * out_stride + column
    tl.store(target, value * scale, mask=column < K)


def unpack_to(weight: DeviceWeight, out: Tensor, *, pdl: bool = False) -> None:
    """The whole weight as numbers, rounded once from the exact float32.

    Args:
        weight: [rows, columns].
        out: float16, bfloat16 or float32 [rows, columns]; its rows may lie apart.
        pdl: as in `few_rows`.

    Raises:
        ValueError: `out` has another shape.
    """
    if tuple(out.shape) != (weight.rows, weight.columns) or out.stride(1) != 1:
        raise ValueError(f"{[weight.rows, weight.columns]} do not go into {list(out.shape)}")
    if weight.layout is None:
        out.copy_(weight.planes["values"])
        return
    form = form_of(weight)
    codes, upper, scales, supers = form.planes
    total = weight.rows * (weight.columns // 32)
    _unpack[(triton.cdiv(total, _SUBS * _AT_ONCE),)](
        *(codes, codes.view(torch.uint8), upper, scales, supers, out, total, out.stride(0)),
        K=weight.columns,
        S=_SUBS,
        TILES=_AT_ONCE,
        FORM=form.traits,
        PDL=pdl,
        num_warps=_WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )


def embedding_rows(
    weight: DeviceWeight, tokens: Tensor, scale: float, out: Tensor, *, pdl: bool = False
) -> None:
    """`out[m] = weight[tokens[m]] * scale`.

    Args:
        weight: [vocabulary, columns].
        tokens: int32 or int64 [M], each below the vocabulary.
        scale: of the model.
        out: float32 [M, columns]; its rows may lie apart.
        pdl: as in `few_rows`.
    """
    launch = {"launch_pdl": True} if pdl else {}
    if weight.layout is None:
        _embed_float[(len(tokens), triton.cdiv(weight.columns, 512))](
            *(weight.planes["values"], tokens, out, float(scale), out.stride(0)),
            K=weight.columns,
            S=512,
            PDL=pdl,
            num_warps=_WARPS,
            **launch,
        )
        return
    form = form_of(weight)
    codes, upper, scales, supers = form.planes
    _embed[(len(tokens), triton.cdiv(weight.columns // 32, _SUBS))](
        *(codes, codes.view(torch.uint8), upper, scales, supers, tokens, out, float(scale)),
        out.stride(0),
        K=weight.columns,
        S=_SUBS,
        FORM=form.traits,
        PDL=pdl,
        num_warps=_WARPS,
        **launch,
    )
