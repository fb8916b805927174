"""Products of 16 to 128 rows: packed weights become float16 on their way to the tensor cores.

A program owns BN rows of the weight and goes along their columns S sub-blocks at a time, with the
next step's words already asked for. Eight rows of four sub-blocks belong to a warp: so much of a
row is read at once as memory gives, and what is written for the tensor cores meets no bank twice.
Where the programs would be too few, several share the columns of a row and a second kernel adds up.

On Hopper cards `pipelined.py` does the same faster, for the formats that it knows; this one is what
it is tested against, and runs everywhere.
"""

# ruff: noqa: RUF005
# The language of kernels has tuples without unpacking.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cuda.spelling import (
    EMULATED,
    SUPER,
    await_inputs,
    depend,
    form_of,
    group_scales,
    spell,
)
from asyncllm.kernels.cuda.weights import DeviceWeight

Config = tuple[int, int, int, int, int]
"""Warps, rows of the weight of a program, sub-blocks of a step, splits along the columns, and steps
that are copied ahead; 0 there means the plain kernel."""

# Bytes 0, 1 and 2, 3 of a word as float16, less an offset, times a scale, plus a minimum: a byte
# under the exponent of 1024 is 1024 and itself. The rest of the operands are pairs of float16.
_WIDEN: Final = tl.constexpr(
    "{ .reg .b32 t, k; mov.b32 k, 0x64646464;"
    " prmt.b32 t, $2, k, 0x4140; add.rn.f16x2 t, t, $5; fma.rn.f16x2 $0, t, $3, $4;"
    " prmt.b32 t, $2, k, 0x4342; add.rn.f16x2 t, t, $5; fma.rn.f16x2 $1, t, $3, $4; }"
)


@triton.jit
def _pair(value):
    """A float32 as two equal float16 in a word."""
    half = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return half | (half << 16)


@triton.jit
def _widen(word, scale, least, offset, EMU: tl.constexpr):
    """Four codes of a word as two words of two float16 each."""
    if EMU:
        s = (scale & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        m = (least & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        o = (offset & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) + 1024
        first = (word & 255).to(tl.float32) + o
        second = ((word >> 8) & 255).to(tl.float32) + o
        third = ((word >> 16) & 255).to(tl.float32) + o
        fourth = ((word >> 24) & 255).to(tl.float32) + o
        low = _two(first * s + m, second * s + m)
        return low, _two(third * s + m, fourth * s + m)
    else:
        return tl.inline_asm_elementwise(
            _WIDEN,
            "=&r,=&r,r,r,r,r",
            [word, scale, least, offset],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _two(low, high):
    a = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    b = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return a | (b << 16)


@triton.jit
def _halves(word):
    """The two float16 of each word, [..., 2]."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _load(codes, upper, scales, supers, row, sub, row4, sub4, row2, sub2, SUBS, FORM: tl.constexpr):
    """What sub-blocks have: a tuple as that of `load_part`."""
    BITS: tl.constexpr = FORM[0]
    SCALE: tl.constexpr = FORM[5]
    if BITS == 8:
        part = (
            tl.load(codes + row4 * (SUBS * 8) + sub4),
            tl.load(codes + row4 * (SUBS * 8) + SUBS * 4 + sub4),
        )
    elif BITS < 4:
        part = (tl.load(codes + row2 * (SUBS * 2) + sub2),)
    else:
        part = (tl.load(codes + row4 * (SUBS * 4) + sub4),)
    if BITS == 6:
        part = part + (tl.load(upper + row2 * (SUBS * 2) + sub2),)
    if BITS == 3 or BITS == 5:
        part = part + (tl.load(upper + row * SUBS + sub),)
    part = part + (tl.load(scales + row * SUBS + sub),)
    if SCALE == SUPER:
        part = part + (tl.load(supers + row * (SUBS // 8) + sub // 8),)
    return part


@triton.jit
def _tensor_rows(
    codes, upper, scales, supers, x, bias, out, N, M, x_stride, out_stride, split_stride,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, S: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr, EMU: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight by BM rows of activations, over one of SPLITS parts of the columns."""
    BITS: tl.constexpr = FORM[0]
    OFFSET: tl.constexpr = FORM[1]
    TABLE: tl.constexpr = FORM[2]
    SCALE: tl.constexpr = FORM[5]
    PARTS: tl.constexpr = FORM[6]
    SUBS: tl.constexpr = K // 32
    STEPS: tl.constexpr = (SUBS + S - 1) // S
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    L: tl.constexpr = BN * S
    depend(PDL)
    # Number i of a step: row 8 (i / 8S) + i % 8, sub-block i / 8 % S.
    i = tl.arange(0, L)
    i2 = tl.arange(0, 2 * L)
    i4 = tl.arange(0, 4 * L)
    row0 = tl.program_id(0) * BN
    row = tl.minimum(row0 + i // (8 * S) * 8 + i % 8, N - 1).to(tl.int64)
    row2 = tl.minimum(row0 + i2 // (16 * S) * 8 + i2 // 2 % 8, N - 1).to(tl.int64)
    row4 = tl.minimum(row0 + i4 // (32 * S) * 8 + i4 // 4 % 8, N - 1).to(tl.int64)
    at = i // 8 % S
    at2 = i2 // 16 % S
    at4 = i4 // 32 % S
    first = tl.program_id(2) * EACH
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, 32 * S)
    place = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    # Beyond the last column activations are 0, and whatever weights are read again are finite.
    sub = tl.minimum(first * S + at, SUBS - 1)
    sub2 = tl.minimum(first * S + at2, SUBS - 1) * 2 + i2 % 2
    sub4 = tl.minimum(first * S + at4, SUBS - 1) * 4 + i4 % 4
    row4 = tl.max_contiguous(tl.multiple_of(row4, 1), 1)
    sub4 = tl.max_contiguous(tl.multiple_of(sub4, 4), 4)
    sub2 = tl.max_contiguous(tl.multiple_of(sub2, 2), 2)
    part = _load(codes, upper, scales, supers, row, sub, row4, sub4, row2, sub2, SUBS, FORM)
    await_inputs(PDL)
    line = x + m[None, :] * x_stride
    used = (m < M)[None, :]
    column = (first * (32 * S) + place)[:, None]
    xs = tl.load(line + column, mask=used & (column < K), other=0.0)
    acc = tl.zeros([BN, BM], tl.float32)
    for number in range(EACH):
        following = first + number + 1
        sub = tl.minimum(following * S + at, SUBS - 1)
        sub2 = tl.minimum(following * S + at2, SUBS - 1) * 2 + i2 % 2
        sub4 = tl.minimum(following * S + at4, SUBS - 1) * 4 + i4 % 4
        sub4 = tl.max_contiguous(tl.multiple_of(sub4, 4), 4)
        sub2 = tl.max_contiguous(tl.multiple_of(sub2, 2), 2)
        coming = _load(codes, upper, scales, supers, row, sub, row4, sub4, row2, sub2, SUBS, FORM)
        column = (following * (32 * S) + place)[:, None]
        next_xs = tl.load(line + column, mask=used & (column < K), other=0.0)
        words = spell(part, L, FORM, EMU)
        # Scales, and super-scales where there are any, come last.
        a, b, least, least_high = group_scales(
            part[PARTS - 1 - (SCALE == SUPER)],
            part[PARTS - 1],
            FORM,
        )
        offset = tl.full([L], 0, tl.float32) - (1024 + (128 if BITS == 8 or TABLE > 0 else OFFSET))
        off = _pair(offset)
        low_scale = _pair(a)
        high_scale = _pair(b)
        low_least = _pair(-least)
        high_least = _pair(-least_high)
        found = ()
        for w in tl.static_range(8):
            word = words[w]
            if BITS == 8 or TABLE > 0:
                word = word ^ -2139062144  # 0x80808080: signed to 128 more
            if BITS == 4 and TABLE == 0 and w >= 4:
                word = (word >> 4) & 0x0F0F0F0F
            if w < 4:
                found = found + _widen(word, low_scale, low_least, off, EMU)
            else:
                found = found + _widen(word, high_scale, high_least, off, EMU)
        # Joining pairs from far apart first leaves the nearest ones innermost.
        for level in tl.static_range(4):
            paired = ()
            for j in tl.static_range(8 >> level):
                paired = paired + (tl.join(found[j], found[j + (8 >> level)]),)
            found = paired
        weights = _halves(tl.reshape(found[0], [L, 16]))  # type: ignore[misc]
        weights = tl.reshape(weights, [BN // 8, S, 8, 32])
        weights = tl.reshape(tl.permute(weights, [0, 2, 1, 3]), [BN, S * 32])
        if EMU:
            acc = tl.dot(weights.to(tl.float32), xs.to(tl.float32), acc)
        else:
            acc = tl.dot(weights, xs, acc)
        part = coming
        xs = next_xs
    n = row0 + tl.arange(0, BN)
    stored = (n < N)[:, None] & (m < M)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0)[:, None]
    target = out + tl.program_id(2) * split_stride
    target += m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(target, acc, mask=stored)


@triton.jit
def add_splits(
    partial, bias, out, N, M, out_stride,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sums of all parts of the columns, one after the other."""
    depend(PDL)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0)
    await_inputs(PDL)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * M + m) * N + n, mask=n < N, other=0)
    tl.store(out + m * out_stride + n, total, mask=n < N)


def tensor_configs(weight: DeviceWeight, rows: int) -> list[Config]:
    """What is worth timing for a weight and a number of rows of activations."""
    found: list[Config] = []
    plain = ((4, 64, 4, 0), (4, 64, 8, 0), (4, 128, 4, 0), (8, 128, 4, 0), (8, 128, 8, 0))
    ahead = ((4, 64, 4, 3), (4, 64, 4, 4), (4, 128, 4, 3), (8, 128, 4, 4), (4, 64, 8, 3))
    for warps, owned, step, stages in (*(ahead if _can_copy_ahead(weight) else ()), *plain):
        programs, steps = triton.cdiv(weight.rows, owned), triton.cdiv(weight.columns // 32, step)
        if stages and weight.columns // 32 % step:
            continue
        for splits in (1, 2, 4, 8):
            # Shares of columns are for matrices of few rows, and each has some steps to do.
            wanted = programs * splits <= 1200 and steps >= 4 * splits
            if splits == 1 or (wanted and not (stages and steps % splits)):
                found.append((warps, owned, step, splits, stages))
    return found


def tensor_default(weight: DeviceWeight, rows: int, *, plain: bool = False) -> Config:
    """A configuration where nothing was timed: what was fastest for an 8B model on an H200.

    Args:
        weight: of a block format.
        rows: of activations.
        plain: the plain kernel's, wherever this runs.
    """
    stages = 3 if _can_copy_ahead(weight) and not plain else 0
    if stages:
        warps, owned, step = 4, 64, 8 if rows <= 32 and weight.columns % 256 == 0 else 4
    elif weight.rows >= 16384:
        warps, owned, step = 8 if rows <= 32 else 4, 128, 4
    else:
        warps, owned, step = (4, 64, 8) if rows <= 32 else (4, 128, 4)
    splits = 1
    programs, steps = triton.cdiv(weight.rows, owned), triton.cdiv(weight.columns // 32, step)
    while splits < 8 and programs * splits <= 200 and steps >= 8 * splits:
        if stages and steps % (2 * splits):
            break
        splits *= 2
    return warps, owned, step, splits, stages


def _can_copy_ahead(weight: DeviceWeight) -> bool:
    """Whether `pipelined.py` knows the weight's format, and the card is one that it is for."""
    layout, device = weight.layout, weight.planes["scales"].device
    if EMULATED or layout is None or device.type != "cuda":
        return False
    known = layout.bits >= 4 and layout.table is None and weight.columns % 128 == 0
    if layout.scale == "super":
        known &= layout.group == (32 if layout.minimum else 16)
    return known and layout.scale != "exponent" and _is_hopper(device.index or 0)


@lru_cache
def _is_hopper(device: int) -> bool:
    if find_spec("triton.experimental.gluon") is None:
        return False
    return bool(torch.cuda.get_device_capability(device)[0] == 9)


def most_partial_sums(
    weights: Sequence[DeviceWeight], rows: int, *, as_rows: int | None = None
) -> int:
    """Elements that `tensor_rows` needs beside its result for any of the weights."""
    found = [0]
    for weight in weights:
        if weight.layout is not None:
            for count in {min(rows, 32), rows}:
                for plain in (False, True):
                    splits = tensor_default(weight, as_rows or count, plain=plain)[3]
                    found.append(splits * count * weight.rows if splits > 1 else 0)
    return max(found)


def tensor_rows(
    weight: DeviceWeight,
    x: Tensor,
    out: Tensor,
    partial: Tensor,
    *,
    bias: Tensor | None = None,
    out_offset: int = 0,
    pdl: bool = False,
    config: Config | None = None,
    as_rows: int | None = None,
) -> None:
    """`out = x @ weight.T` on tensor cores, weights rounded to float16.

    Args:
        weight: [outputs, columns], of a block format.
        x: float16 [rows, columns], `ordered` as `rows.norm` and others write them.
        out: float32 [rows, at least out_offset + outputs]; written from column out_offset on.
        partial: float32, flat, of `most_partial_sums`.
        bias: float32 [outputs], added.
        out_offset: see `out`.
        pdl: as in `few_rows`.
        config: one of `tensor_configs`.
        as_rows: rows that configuration and tiles are chosen for; `None`: as many as there are.
            With the same number here a row's result is the same, to the bit, among any others.

    Raises:
        ValueError: the shapes do not fit.
    """
    rows, columns = x.shape
    if columns != weight.columns or out.shape[1] < out_offset + weight.rows or len(out) < rows:
        raise ValueError(
            f"{list(x.shape)} by [{weight.rows}, {weight.columns}] does not go into "
            f"{list(out.shape)}"
        )
    warps, owned, step, splits, stages = config or tensor_default(weight, as_rows or rows)
    if splits > 1 and partial.numel() < splits * rows * weight.rows:
        raise ValueError(f"{splits} splits of {rows} rows: {partial.numel()} partial sums")
    target = out[:rows, out_offset : out_offset + weight.rows]
    form = form_of(weight)
    block_rows = max(16, min(64, triton.next_power_of_2(as_rows or rows)))
    launch: dict[str, Any] = {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})
    some_bias = target if bias is None else bias
    alone = splits == 1
    grid = (triton.cdiv(weight.rows, owned), triton.cdiv(rows, block_rows), splits)
    arguments = (
        *(*form.planes, x, some_bias, target if alone else partial, weight.rows, rows),
        *(x.stride(0), out.stride(0) if alone else weight.rows, rows * weight.rows),
    )
    traits: dict[str, Any] = {
        "K": columns,
        "BN": owned,
        "BM": block_rows,
        "S": step,
        "SPLITS": splits,
        "BIAS": alone and bias is not None,
        "FORM": form.traits,
        "num_warps": warps,
        **launch,
    }
    if stages:
        from asyncllm.kernels.cuda import pipelined

        where = pipelined.layouts(owned, step, warps)
        pipelined.tensor_rows_kernel[grid](*arguments, STAGES=stages, **traits, **where)
    else:
        _tensor_rows[grid](*arguments, EMU=EMULATED, num_stages=1, **traits)
    if not alone:
        add_splits[(triton.cdiv(weight.rows, 512), rows)](
            *(partial, some_bias, target, weight.rows, rows, out.stride(0)),
            SPLITS=splits,
            BLOCK=512,
            BIAS=bias is not None,
            num_warps=4,
            **launch,
        )
