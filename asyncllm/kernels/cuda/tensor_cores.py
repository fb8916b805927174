"""Products of 16 to 128 rows: weights become float16 on the way to the tensor cores.

The columns of a product may come in any order that weight and activations share. Byte b of all the
weight's words has the columns 4j + b of their halves, so activations are put in the order of such
planes first (`order_planes`), and a step of the product is eight small ones, a plane each, without
moving a weight between threads. Above 128 rows, and for weights that are floats, the vendor's
product takes over (`dense_rows`).
"""

# ruff: noqa: RUF005, SIM108
# The language of kernels has tuples without unpacking.

from __future__ import annotations

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
    table_value,
)
from asyncllm.kernels.cuda.unpacking import unpack_to
from asyncllm.kernels.cuda.weights import DeviceWeight

Config = tuple[int, int, int, int, int]
"""Warps, rows of the weight of a program, words of a step, splits along the columns, stages."""

# Turns eight nibbles of two words into float16 and multiplies by a scale, adds a minimum, two at a
# time: a nibble under the exponent of 1024 (or, four bits higher, of 64) is that and itself.
_NIBBLES: Final = tl.constexpr(
    "{ .reg .b32 t, u, m1, m2, k1, k2, c1, c2;"
    " mov.b32 m1, 0x000F000F; mov.b32 m2, 0x00F000F0; mov.b32 k1, 0x64006400;"
    " mov.b32 k2, 0x54005400; mov.b32 c1, 0xE400E400; mov.b32 c2, 0xD400D400;"
    + "".join(
        f" prmt.b32 t, $8, $9, {pick};"
        f" lop3.b32 u, t, m1, k1, 0xEA; add.rn.f16x2 u, u, c1;"
        f" fma.rn.f16x2 ${2 * byte}, u, $10, $11;"
        f" lop3.b32 u, t, m2, k2, 0xEA; add.rn.f16x2 u, u, c2;"
        f" fma.rn.f16x2 ${2 * byte + 1}, u, $10, $11;"
        for byte, pick in enumerate(("0x4400", "0x5511", "0x6622", "0x7733"))
    )
    + " }"
)
_NIBBLES_CONSTRAINTS: Final = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")


@triton.jit
def _order(x, planes, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    depend(PDL)
    await_inputs(PDL)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < K // 8
    row = tl.program_id(0).to(tl.int64)
    place = x + row * x_stride + word // 4 * 32 + word % 4 * 4
    for plane in tl.static_range(8):
        value = tl.load(place + plane % 2 * 16 + plane // 2, mask=inside, other=0)
        target = planes + row * K + plane * (K // 8) + word
        tl.store(target, value.to(planes.dtype.element_ty), mask=inside)


@triton.jit
def _widened(group, BN: tl.constexpr, KW: tl.constexpr):
    """What each sub-block has, for each of its four words: [BN, KW / 4] to [BN, KW]."""
    return tl.reshape(tl.broadcast_to(group[:, :, None], [BN, KW // 4, 4]), [BN, KW])


@triton.jit
def _number(code, OFFSET: tl.constexpr):
    """An integer from 0 to 1023, less OFFSET, as float16: put under the exponent of 1024."""
    return (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (1024 + OFFSET)


@triton.jit
def _plane_values(words, highs, bits, pairs, a, b, m, n, FORM: tl.constexpr, EMU: tl.constexpr):
    """Eight planes of weights, float16 [BN, KW], from words [BN, KW]."""
    BITS: tl.constexpr = FORM[0]
    OFFSET: tl.constexpr = FORM[1]
    TABLE: tl.constexpr = FORM[2]
    GROUP: tl.constexpr = FORM[3]
    if BITS == 4 and TABLE == 0 and OFFSET == 0 and GROUP == 32 and not EMU:
        values = tl.inline_asm_elementwise(
            _NIBBLES,
            _NIBBLES_CONSTRAINTS,
            [words, a, m],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        values = ()
        j = (tl.arange(0, words.shape[1]) % 4)[None, :]
        for plane in tl.static_range(8):
            # Plane 2b + h: byte b of the words, half h. A name for b would be no constant.
            if BITS == 8:
                code = ((words if plane % 2 == 0 else highs) >> (plane // 2 * 8)) & 255
                number = _number(code ^ 128, 128)
            else:
                if BITS < 4:
                    code = (words if plane % 2 == 0 else highs) >> (plane // 2 * 8 + 2 * j)
                    code &= 3
                else:
                    code = (words >> (plane // 2 * 8 + plane % 2 * 4)) & 15
                if BITS == 6:
                    more = (pairs if plane % 2 == 0 else highs) >> (plane // 2 * 8 + 2 * j)
                    code |= (more & 3) << 4
                if BITS == 3 or BITS == 5:
                    more = bits >> (plane // 2 * 8 + plane % 2 * 4 + j)
                    code |= (more & 1) << (BITS - 1)
                if TABLE > 0:
                    number = _number(table_value(code, TABLE) + 128, 128)
                else:
                    number = _number(code, OFFSET)
            if plane % 2 == 0:
                values = values + (number * a + m,)
            else:
                values = values + (number * b + n,)
    return values


@triton.jit
def _many_rows(
    codes,
    upper,
    scales,
    supers,
    planes,
    residual,
    bias,
    out,
    N,
    M,
    residual_stride,
    out_stride,
    split_stride,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    KW: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    RES: tl.constexpr,
    BIAS: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
    EMU: tl.constexpr,
):
    """BN rows of the weight by BM rows of activations, over one of SPLITS parts of the columns."""
    BITS: tl.constexpr = FORM[0]
    SCALE: tl.constexpr = FORM[5]
    SUBS: tl.constexpr = K // 32
    WORDS: tl.constexpr = K // 8
    STEPS: tl.constexpr = (WORDS + KW - 1) // KW
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    depend(PDL)
    await_inputs(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    x_row = planes + m.to(tl.int64)[None, :] * K
    acc = tl.zeros([BN, BM], tl.float32)
    for i in tl.range(0, EACH, num_stages=STAGES):
        step = tl.program_id(2) * EACH + i
        w = step * KW + tl.arange(0, KW)
        s = step * (KW // 4) + tl.arange(0, KW // 4)
        # Columns beyond the last have activations of 0, and whatever weights they read are finite.
        sub = tl.minimum(s, SUBS - 1)[None, :]
        word = tl.minimum(w, WORDS - 1)[None, :]
        if BITS == 8:
            words = tl.load(codes + row * (SUBS * 8) + word)
            highs = tl.load(codes + row * (SUBS * 8) + SUBS * 4 + word)
        elif BITS >= 4:
            words = tl.load(codes + row * WORDS + word)
            highs = words
        pairs = 0
        bits = 0
        if BITS < 4 or BITS == 6:
            two = (codes if BITS < 4 else upper) + row * (SUBS * 2) + sub * 2
            pairs = _widened(tl.load(two), BN, KW)
            highs = _widened(tl.load(two + 1), BN, KW)
            if BITS < 4:
                words = pairs
        if BITS == 3 or BITS == 5:
            bits = _widened(tl.load(upper + row * SUBS + sub), BN, KW)
        scale = tl.load(scales + row * SUBS + sub)
        super_ = scale
        if SCALE == SUPER:
            super_ = tl.load(supers + row * (SUBS // 8) + sub // 8)
        a, b, least, least_high = group_scales(scale, super_, FORM)
        values = _plane_values(
            *(words, highs, bits, pairs),
            _widened(a.to(tl.float16), BN, KW),
            _widened(b.to(tl.float16), BN, KW),
            _widened((-least).to(tl.float16), BN, KW),
            _widened((-least_high).to(tl.float16), BN, KW),
            FORM,
            EMU,
        )
        place = x_row + w[:, None]
        for plane in tl.static_range(8):
            x = tl.load(
                place + plane * WORDS, mask=(m < M)[None, :] & (w < WORDS)[:, None], other=0
            )
            acc = tl.dot(values[plane], x, acc)
    stored = (n < N)[:, None] & (m < M)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0)[:, None]
    if RES:
        place = residual + m.to(tl.int64)[None, :] * residual_stride + n[:, None]
        acc += tl.load(place, mask=stored, other=0)
    target = (
        out + tl.program_id(2) * split_stride + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    )
    tl.store(target, acc, mask=stored)


@triton.jit
def _add_splits(
    partial,
    residual,
    bias,
    out,
    N,
    M,
    residual_stride,
    out_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RES: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    depend(PDL)
    await_inputs(PDL)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * M + m) * N + n, mask=n < N, other=0)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0)
    if RES:
        total += tl.load(residual + m * residual_stride + n, mask=n < N, other=0)
    tl.store(out + m * out_stride + n, total, mask=n < N)


def order_planes(x: Tensor, planes: Tensor, *, pdl: bool = False) -> None:
    """Activations in the order that `many_rows` takes them in.

    Args:
        x: float32, float16 or bfloat16 [rows, columns]; its rows may lie apart.
        planes: float16 [rows, columns], contiguous; plane 2b + h has the columns 16h + 4j + b of
            all sub-blocks.
        pdl: as in `few_rows`.
    """
    rows, columns = x.shape
    _order[(rows, triton.cdiv(columns // 8, 256))](
        *(x, planes, x.stride(0)),
        K=columns,
        BLOCK=256,
        PDL=pdl,
        num_warps=2,
        **({"launch_pdl": True} if pdl else {}),
    )


def many_configs(weight: DeviceWeight, rows: int) -> list[Config]:
    """What is worth timing for a weight and a number of rows of activations."""
    found: list[Config] = []
    words = weight.columns // 8
    for owned, warps in ((64, 4), (128, 4), (128, 8)):
        programs = triton.cdiv(weight.rows, owned)
        for splits in (1, 2, 4, 8):
            # Splits are for matrices of few rows, of which each still has some steps.
            if splits > 1 and (programs * splits > 600 or words // splits < 128):
                continue
            found += [(warps, owned, w, splits, st) for w, st in ((32, 2), (32, 3), (64, 2))]
    return found


def many_default(weight: DeviceWeight, rows: int) -> Config:
    """A configuration where nothing was timed."""
    # Shared memory holds three stages of 128 weights' rows by 64, or two of 64 by 128.
    owned = 128 if weight.rows >= 16384 and rows <= 64 else 64
    programs, splits = triton.cdiv(weight.rows, owned), 1
    while programs * splits < 200 and splits < 8 and weight.columns // 8 // (2 * splits) >= 128:
        splits *= 2
    return 4 if owned == 64 else 8, owned, 32, splits, 3 if rows <= 64 else 2


def many_rows(
    weight: DeviceWeight,
    x: Tensor,
    out: Tensor,
    planes: Tensor,
    partial: Tensor,
    *,
    ordered: bool = False,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    out_offset: int = 0,
    pdl: bool = False,
    config: Config | None = None,
) -> None:
    """`out = x @ weight.T` on tensor cores, weights rounded to float16.

    Args:
        weight: [outputs, columns].
        x: float16 or float32 [rows, columns].
        out: float32 [rows, at least out_offset + outputs]; written from column out_offset on.
        planes: float16, flat, at least rows * columns elements; receives `x` in the order of
            planes, or has it if `ordered`, from the same rows' product by another weight.
        partial: float32, flat, at least splits * rows * outputs elements, unless splits are 1.
        ordered: see `planes`.
        residual: float32 [rows, outputs], added; may be what is written.
        bias: float32 [outputs], added.
        out_offset: see `out`.
        pdl: as in `few_rows`.
        config: one of `many_configs`.

    Raises:
        ValueError: the shapes do not fit.
    """
    rows, columns = x.shape
    if columns != weight.columns or out.shape[1] < out_offset + weight.rows or len(out) < rows:
        raise ValueError(
            f"{list(x.shape)} by [{weight.rows}, {weight.columns}] does not go into "
            f"{list(out.shape)}"
        )
    target = out[:rows, out_offset : out_offset + weight.rows]
    if weight.layout is None:
        _vendor_product(x, weight.planes["values"], target)
        if residual is not None:
            target += residual
        if bias is not None:
            target += bias
        return
    warps, owned, step, splits, stages = config or many_default(weight, rows)
    if splits > 1 and partial.numel() < splits * rows * weight.rows:
        raise ValueError(f"{splits} splits need {splits * rows * weight.rows} partial sums")
    planes = planes[: rows * columns].view(rows, columns)
    if not ordered:
        order_planes(x, planes, pdl=pdl)
    form = form_of(weight)
    block_rows = max(16, min(128, triton.next_power_of_2(rows)))
    launch: dict[str, Any] = {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})
    adds = {"RES": residual is not None, "BIAS": bias is not None}
    extra = (target if residual is None else residual, target if bias is None else bias)
    strides = (0 if residual is None else residual.stride(0), out.stride(0))
    grid = (triton.cdiv(weight.rows, owned), triton.cdiv(rows, block_rows), splits)
    _many_rows[grid](
        *(*form.planes, planes, *extra, target if splits == 1 else partial, weight.rows, rows),
        *(strides if splits == 1 else (0, weight.rows)),
        rows * weight.rows,
        K=columns,
        BN=owned,
        BM=block_rows,
        KW=step,
        SPLITS=splits,
        STAGES=stages,
        FORM=form.traits,
        EMU=EMULATED,
        num_warps=warps,
        **launch,
        **(adds if splits == 1 else {"RES": False, "BIAS": False}),
    )
    if splits > 1:
        _add_splits[(triton.cdiv(weight.rows, 512), rows)](
            *(partial, *extra, target, weight.rows, rows, *strides),
            SPLITS=splits,
            BLOCK=512,
            num_warps=4,
            **launch,
            **adds,
        )


def dense_rows(
    weight: DeviceWeight, x: Tensor, out: Tensor, buffer: Tensor, *, pdl: bool = False
) -> None:
    """`out = x @ weight.T` through the vendor's product, for prompts.

    Args:
        weight: [outputs, columns].
        x: float16 or bfloat16 [rows, columns].
        out: float32 [rows, outputs].
        buffer: of the dtype of `x`, flat; what it holds is unpacked at a time, at least one row.
        pdl: of the unpacking, as in `few_rows`.
    """
    if weight.layout is None and weight.planes["values"].dtype == x.dtype:
        _vendor_product(x, weight.planes["values"], out)
        return
    step = min(weight.rows, buffer.numel() // weight.columns)
    for start in range(0, weight.rows, step):
        part = weight.slice(start, min(weight.rows, start + step))
        numbers = buffer[: part.rows * weight.columns].view(part.rows, weight.columns)
        unpack_to(part, numbers, pdl=pdl)
        _vendor_product(x, numbers, out[:, start : start + part.rows])


def _vendor_product(x: Tensor, values: Tensor, out: Tensor) -> None:
    if x.dtype == values.dtype == out.dtype:
        torch.mm(x, values.t(), out=out)
    elif out.is_cuda:
        torch.ops.aten.mm.dtype_out(x.to(values.dtype), values.t(), torch.float32, out=out)
    else:
        torch.mm(x.float(), values.float().t(), out=out)
