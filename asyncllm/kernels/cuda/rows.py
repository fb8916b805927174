"""Kernels over rows of activations: norms, quantisation, gates, and the heads of q, k and v.

Nothing here allocates or synchronises: every buffer comes from the caller, so that all of it can be
captured in a CUDA graph. With `pdl` a kernel lets the next one start at once, and waits for the one
before it where it first needs its results (programmatic dependent launch).

A row whose slot is below 0 only pads a batch: nothing of it reaches the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    # int32 [M, 2, K / 8], float32 [M, K / 32], int32 [M, K / 32]; see `put_quantised`.
    Quantised = tuple[Tensor, Tensor, Tensor]

    # Of K and of V, float32 [blocks, kv_heads, block_tokens], of which only blocks may lie apart.
    KvScales = tuple[Tensor, Tensor]

QUANTISED_COLUMNS = 32

# Runs of 32 columns that a program of `half_norm` does.
HALF_NORM_RUNS = 8

# Adding it to a float32 of up to 2**22 leaves the nearest integer in the low bits, even on ties.
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
_ROUNDER_BITS: tl.constexpr = tl.constexpr(0x4B400000)
_INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softcapped(x, cap):
    """`cap * tanh(x / cap)`."""
    y = x / cap
    far = 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)
    # Near 0 the difference above has few digits left.
    z = y * y
    near = y * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315))))
    return cap * tl.where(tl.abs(y) < 0.125, near, far)


@triton.jit
def to_int8(v):
    """Lines of float32 [N, W] as whole numbers up to 127, int32, and what they are multiples of.

    A line with a NaN or an infinity is a multiple of NaN.
    """
    # Bits of positive floats order as they do, and NaN comes last; a maximum of floats drops NaN.
    peak = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    wrong = peak >= _INFINITY_BITS
    largest = peak.to(tl.float32, bitcast=True)
    tiny = wrong | (largest < 1e-36)  # 127 / largest would overflow
    inverse = tl.where(tiny, 0.0, 127.0 / tl.where(tiny, 1.0, largest))
    v = tl.where(wrong[:, None], 0.0, v)
    bits = (v * inverse[:, None] + _ROUNDER).to(tl.int32, bitcast=True)
    return bits - _ROUNDER_BITS, tl.where(wrong, float("nan"), largest / 127)


@triton.jit
def put_quantised(v, row, block, keep, xq, xd, xs, K: tl.constexpr):
    """Write runs of 32 columns as int8 with a scale each.

    `v`: float32 [N, 32]; `row`, `block`: where each run belongs, int64 and int32 [N] or scalars;
    `keep`: which to write. Plane 0 of `xq` has the first 16 columns of each run, plane 1 the rest;
    `xs` the sums of both, 16 bits each. A run with a NaN or an infinity gets the scale NaN.
    """
    i = tl.arange(0, 32)[None, :]
    q, scale = to_int8(v)
    sums = tl.sum(tl.where(i < 16, q, q * 65536), 1)
    # A negative low half has borrowed from the high one.
    sums += tl.where((sums & 0x8000) != 0, 65536, 0)
    at = (row * K + block * 16)[:, None] + (i // 16) * (K // 2) + i % 16
    bytes_ = xq.to(tl.pointer_type(tl.int8), bitcast=True)
    tl.store(bytes_ + at, q.to(tl.int8), mask=keep[:, None])
    tl.store(xd + row * (K // 32) + block, scale, mask=keep)
    tl.store(xs + row * (K // 32) + block, sums, mask=keep)


@triton.jit
def to_half(v, half):
    """As what `half` points to; what float16 cannot hold becomes the largest that it can."""
    if half.dtype.element_ty == tl.float16:
        # Comparisons that NaN fails: it stays.
        v = tl.where(v > 65504.0, 65504.0, tl.where(v < -65504.0, -65504.0, v))
    return v.to(half.dtype.element_ty)


@triton.jit
def in_order(column, ORDERED: tl.constexpr):
    """Where a column is put: in ordered rows column 4c + 2h + e of 16 is at 2c + 8h + e."""
    if ORDERED:
        column = column // 16 * 16 + column // 2 % 2 * 8 + column // 4 % 4 * 2 + column % 2
    return column


@triton.jit
def _put(v, row, block, keep, xq, xd, xs, half, out, K: tl.constexpr, ORDERED: tl.constexpr):
    """Write runs of 32 columns, float32 [N, 32], in every form that is asked for."""
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = keep[:, None] & (column < K)
    if half is not None:
        tl.store(half + row * K + in_order(column, ORDERED), to_half(v, half), mask=inside)
    if out is not None:
        tl.store(out + row * K + column, v, mask=inside)
    if xq is not None:
        put_quantised(v, row, block, keep, xq, xd, xs, K)


@triton.jit
def _total(v):
    return tl.sum(tl.sum(v, 1), 0)


@triton.jit
def _norm(
    x, weight, added, post_weight, into, xq, xd, xs, half, out, eps,
    D: tl.constexpr, B: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, 32)[None, :]
    block = tl.arange(0, B)
    column = block[:, None] * 32 + i
    inside = column < D
    if PARTS == 1 and weight is not None:
        # Weights do not depend on the kernel before.
        w = tl.load(weight + column, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    v = tl.load(x + row * D + column, mask=inside, other=0.0)
    post = 1.0
    if added is not None:
        a = tl.load(added + row * D + column, mask=inside, other=0.0)
        if post_weight is not None:
            post = 1.0 / tl.sqrt(_total(a * a) / D + eps)
            a = a * post * tl.load(post_weight + column, mask=inside, other=0.0)
        v += a
    scale = 1.0
    if weight is not None:
        scale = 1.0 / tl.sqrt(_total(v * v) / D + eps)
    if PARTS > 1:
        # Each part has seen the whole row; now its own columns again, which are near by now.
        per: tl.constexpr = (D + 32 * PARTS - 1) // (32 * PARTS)
        own = tl.arange(0, S)
        block = tl.program_id(1) * per + own
        column = block[:, None] * 32 + i
        inside = (own < per)[:, None] & (column < D)
        v = tl.load(x + row * D + column, mask=inside, other=0.0)
        if added is not None:
            a = tl.load(added + row * D + column, mask=inside, other=0.0)
            if post_weight is not None:
                a = a * post * tl.load(post_weight + column, mask=inside, other=0.0)
            v += a
        if weight is not None:
            w = tl.load(weight + column, mask=inside, other=0.0)
    if added is not None:
        tl.store(into + row * D + column, v, mask=inside)
    if weight is not None:
        v = v * scale * w
    keep = block * 32 < D
    if PARTS > 1:
        keep &= own < per
    _put(v, row, block, keep, xq, xd, xs, half, out, D, ORDERED)


def norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    quantised: Quantised | None = None,
    half: Tensor | None = None,
    ordered: bool = False,
    out: Tensor | None = None,
    added: Tensor | None = None,
    post_weight: Tensor | None = None,
    into: Tensor | None = None,
    parts: int = 1,
    pdl: bool = False,
    warps: int | None = None,
) -> None:
    """RMSNorm of each row, after adding to it, in up to three forms.

    Args:
        x: float32 [M, D].
        weight: float32 [D]; `None`: no norm, the sum itself is written.
        eps: added to the mean square.
        quantised: the result as int8 rows; D is a multiple of 32.
        half: the result as float16 or bfloat16 [M, D].
        ordered: `half` is for `tensor_rows`, its columns in that order; D is a multiple of 16.
        out: the result as float32 [M, D].
        added: float32 [M, D], added to `x` first.
        post_weight: float32 [D]: what is added is normed by it before.
        into: where the sum goes, float32 [M, D]; `None`: to `x`.
        parts: programs that share a row.
        pdl: programmatic dependent launch.
        warps: of a program; `None`: by the width.

    Raises:
        ValueError: several parts would read a row that others are changing.
    """
    rows, width = x.shape
    into = x if into is None else into
    if parts > 1 and added is not None and into.data_ptr() == x.data_ptr():
        raise ValueError(f"parts={parts}: the sum needs a buffer of its own, into is x")
    blocks = triton.cdiv(width, QUANTISED_COLUMNS)
    xq, xd, xs = _planes(quantised, width)
    _norm[(rows, parts)](
        x, weight, added, post_weight, into if added is not None else None,
        xq, xd, xs, half, out, eps,
        D=width, B=triton.next_power_of_2(blocks),
        S=triton.next_power_of_2(triton.cdiv(blocks, parts)), PARTS=parts, ORDERED=ordered, PDL=pdl,
        num_warps=warps or warps_for(width, 512), **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _half_norm(x, weight, xq, xd, xs, squares, D: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * S + tl.arange(0, S)
    keep = block * 32 < D
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    w = tl.load(weight + column, mask=keep[:, None], other=0.0)
    if PDL:
        gdc_wait()
    v = tl.load(x + row * D + column, mask=keep[:, None], other=0.0)
    tl.store(squares + row * tl.num_programs(1) + tl.program_id(1), _total(v * v))
    put_quantised(v * w, row, block, keep, xq, xd, xs, D)


def half_norm_parts(width: int) -> int:
    """Programs that share a row of `half_norm`."""
    return triton.cdiv(width, HALF_NORM_RUNS * QUANTISED_COLUMNS)


def half_norm(
    x: Tensor,
    weight: Tensor,
    quantised: Quantised,
    squares: Tensor,
    *,
    pdl: bool = False,
    warps: int = 4,
) -> None:
    """RMSNorm of rows [M, D] but for the factor of each, which is left to who multiplies.

    So no program needs a whole row, and a row is done by many at once.

    Args:
        x: float32 [M, D]; D is a multiple of 32.
        weight: float32 [D].
        quantised: `x * weight` as int8 rows.
        squares: sums of squares of parts of `x`, float32 [M, half_norm_parts(D)].
        pdl: programmatic dependent launch.
        warps: of a program.
    """
    rows, width = x.shape
    xq, xd, xs = _planes(quantised, width)
    _half_norm[(rows, half_norm_parts(width))](
        x, weight, xq, xd, xs, squares, D=width, S=HALF_NORM_RUNS, PDL=pdl,
        num_warps=warps, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _quantise(x, xq, xd, xs, K: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * S + tl.arange(0, S)
    keep = block * 32 < K
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    v = tl.load(x + row * K + column, mask=keep[:, None], other=0.0).to(tl.float32)
    put_quantised(v, row, block, keep, xq, xd, xs, K)


def quantise(
    x: Tensor, quantised: Quantised, *, blocks: int = 8, pdl: bool = False, warps: int = 4
) -> None:
    """Float rows [M, K], K a multiple of 32, as int8 rows; a program does `blocks` runs of 32."""
    rows, width = x.shape
    xq, xd, xs = _planes(quantised, width)
    _quantise[(rows, triton.cdiv(width, 32 * blocks))](
        x, xq, xd, xs, K=width, S=blocks, PDL=pdl, num_warps=warps, **launch_options(pdl)
    )


@triton.jit
def _gate(
    gate_up, xq, xd, xs, half, out,
    F: tl.constexpr, S: tl.constexpr, SILU: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * S + tl.arange(0, S)
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < F
    at = gate_up + row * (2 * F) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        v = gate * sigmoid(gate)
    else:
        # 0.5 (1 + tanh(y)) is sigmoid(2 y), here with y = sqrt(2 / pi) (x + 0.044715 x^3).
        v = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    _put(v * up, row, block, block * 32 < F, xq, xd, xs, half, out, F, ORDERED)


def gate(
    gate_up: Tensor,
    activation: str,
    *,
    quantised: Quantised | None = None,
    half: Tensor | None = None,
    ordered: bool = False,
    out: Tensor | None = None,
    blocks: int = 8,
    pdl: bool = False,
    warps: int = 4,
) -> None:
    """`activation(gate) * up` in up to three forms.

    Args:
        gate_up: float32 or bfloat16 [M, 2 F]: all of gate, then all of up.
        activation: `"silu"` or `"gelu_tanh"`.
        quantised: the result as int8 rows; F is a multiple of 32.
        half: the result as float16 or bfloat16 [M, F].
        ordered: as in `norm`.
        out: the result as float32 [M, F].
        blocks: runs of 32 columns a program does, a power of two.
        pdl: programmatic dependent launch.
        warps: of a program.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    xq, xd, xs = _planes(quantised, width)
    _gate[(rows, triton.cdiv(width, 32 * blocks))](
        gate_up, xq, xd, xs, half, out,
        F=width, S=blocks, SILU=activation == "silu", ORDERED=ordered, PDL=pdl,
        num_warps=warps, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _heads(
    qkv, bias, q_norm, k_norm, cos, sin, positions, slots, tables, rings, keys, values,
    key_scales, value_scales, q_out, eps, scale, table_stride, scale_stride,
    H: tl.constexpr, KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr,
    HB: tl.constexpr, BT: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HB  # heads of a program are all q, all k or all v
    head = first + tl.arange(0, HB)
    i = tl.arange(0, P)
    inside = i < HD
    rotated = i < 2 * HALF
    if INTERLEAVED:
        partner = tl.where(rotated, i ^ 1, i)
        angle = i // 2
        leads = i % 2 == 0
    else:
        partner = tl.where(i < HALF, i + HALF, tl.where(rotated, i - HALF, i))
        angle = tl.where(i < HALF, i, i - HALF)
        leads = i < HALF
    is_q = first < H
    is_k = (first >= H) & (first < H + KH)
    # All that was there before the step began: only `qkv` is the kernel before's. Not from a cache
    # of the processor's own, which may be older than the step.
    slot = tl.load(slots + row, cache_modifier=".cg")
    used = slot >= 0
    position = tl.where(used, tl.load(positions + row, cache_modifier=".cg"), 0)
    number = position // BT
    if rings is not None:
        ring = tl.load(rings + slot, mask=used, other=0, cache_modifier=".cg")
        number = tl.where(ring > 0, number % tl.maximum(ring, 1), number)
    block_at = tables + slot.to(tl.int64) * table_stride + number
    block = tl.load(block_at, mask=used, other=0, cache_modifier=".cg")
    place = (block.to(tl.int64) * BT + position % BT) * KH
    scale_place = block.to(tl.int64) * scale_stride + position % BT
    turn = position.to(tl.int64) * HALF + angle
    c = tl.load(cos + turn, mask=rotated, other=1.0)
    s = tl.load(sin + turn, mask=rotated, other=0.0)
    if q_norm is not None:
        wv = tl.load(q_norm + i, mask=inside & is_q, other=0.0)
        wv += tl.load(k_norm + i, mask=inside & is_k, other=0.0)
        wu = tl.load(q_norm + partner, mask=inside & is_q, other=0.0)
        wu += tl.load(k_norm + partner, mask=inside & is_k, other=0.0)
    if PDL:
        gdc_wait()

    line = qkv + row * ((H + 2 * KH) * HD) + head[:, None] * HD
    v = tl.load(line + i[None, :], mask=inside[None, :], other=0.0)
    if bias is not None:
        v += tl.load(bias + head[:, None] * HD + i[None, :], mask=inside[None, :], other=0.0)
    if is_q | is_k:
        # The other element of each pair is read once more rather than moved between threads.
        u = tl.load(line + partner[None, :], mask=inside[None, :], other=0.0)
        if bias is not None:
            at = bias + head[:, None] * HD + partner[None, :]
            u += tl.load(at, mask=inside[None, :], other=0.0)
        if q_norm is not None:
            size = 1.0 / tl.sqrt(tl.sum(v * v, 1) / HD + eps)
            v = v * size[:, None] * wv[None, :]
            u = u * size[:, None] * wu[None, :]
        v = v * c[None, :] + u * tl.where(leads, -s, s)[None, :]
    if is_q:
        q_at = q_out + (row * H + head)[:, None] * HD + i[None, :]
        tl.store(q_at, (v * scale).to(q_out.dtype.element_ty), mask=inside[None, :])
    elif is_k:
        k_at = keys + (place + head - H)[:, None] * HD + i[None, :]
        if key_scales is None:
            tl.store(k_at, v.to(keys.dtype.element_ty), mask=inside[None, :] & used)
        else:
            whole, step = to_int8(v)
            tl.store(k_at, whole.to(tl.int8), mask=inside[None, :] & used)
            tl.store(key_scales + scale_place + (head - H) * BT, step, mask=used)
    else:
        v_at = values + (place + head - H - KH)[:, None] * HD + i[None, :]
        if value_scales is None:
            tl.store(v_at, v.to(values.dtype.element_ty), mask=inside[None, :] & used)
        else:
            whole, step = to_int8(v)
            tl.store(v_at, whole.to(tl.int8), mask=inside[None, :] & used)
            tl.store(value_scales + scale_place + (head - H - KH) * BT, step, mask=used)


def heads(
    qkv: Tensor,
    q_out: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rings: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    interleaved: bool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    scales: KvScales | None = None,
    tile: int | None = None,
    pdl: bool = False,
    warps: int | None = None,
) -> None:
    """From the product of q, k and v to queries and to K and V in the pool.

    Args:
        qkv: float32 [M, (heads + 2 kv_heads) head_dim].
        q_out: [M, heads, head_dim], queries: normed, rotated, scaled.
        keys: [blocks, block_tokens, kv_heads, head_dim].
        values: likewise.
        tables: int32 [max_seqs, max_blocks].
        rings: int32 [max_seqs], blocks of each sequence's ring, 0: none; `None`: no rings at all.
        slots: int32 [M], the sequence of each row; below 0: only padding.
        positions: int32 [M].
        cos: float32 [context, rotary_dim / 2], worked out in float64.
        sin: likewise.
        scale: multiplies the queries.
        interleaved: pairs are elements 2i and 2i+1; otherwise i and i + rotary_dim / 2.
        q_norm: float32 [head_dim], norm of each head of q.
        k_norm: likewise of k; both or neither.
        eps: of these norms.
        bias: float32, added to every row of `qkv` first.
        scales: of int8 K and V: each head's largest magnitude divided by 127.
        tile: heads of a program, a divisor of `heads` and of `kv_heads`, a power of two.
        pdl: programmatic dependent launch.
        warps: of a program.
    """
    rows, count, head_dim = q_out.shape
    kv_heads = keys.shape[2]
    padded = triton.next_power_of_2(head_dim)
    if tile is None:
        # Few programs a row once there are many rows.
        tile = 1
        while tile < 8 and count % (2 * tile) == kv_heads % (2 * tile) == 0 and rows > 8 * tile:
            tile *= 2
    _heads[(rows, (count + 2 * kv_heads) // tile)](
        qkv, bias, q_norm, k_norm, cos, sin, positions, slots, tables, rings, keys, values,
        *scale_planes(keys, scales), q_out, eps, scale, tables.stride(0), scale_stride(scales),
        H=count, KH=kv_heads, HD=head_dim, P=padded, HALF=cos.shape[1], HB=tile,
        BT=keys.shape[1], INTERLEAVED=interleaved, PDL=pdl,
        num_warps=warps or warps_for(tile * padded, 128), **launch_options(pdl),
    )  # fmt: skip


def emulated() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def launch_options(pdl: bool) -> dict[str, Any]:
    """What the launch of a kernel needs beside its arguments."""
    return {"launch_pdl": True} if pdl else {}


def warps_for(elements: int, elements_a_warp: int) -> int:
    """Warps of a program that holds so many elements: a power of two up to 16."""
    warps: int = triton.next_power_of_2(triton.cdiv(elements, elements_a_warp))
    return min(16, warps)


def _planes(quantised: Quantised | None, width: int) -> tuple[Tensor | None, ...]:
    """The parts of quantised rows as the kernels take them: the int8 as bytes."""
    if quantised is None:
        return None, None, None
    if width % QUANTISED_COLUMNS:
        raise ValueError(f"rows of {width} columns: int8 rows need a multiple of 32")
    return quantised


def scale_planes(keys: Tensor, scales: KvScales | None) -> tuple[Tensor | None, Tensor | None]:
    """Scales of K and of V as the kernels take them.

    Raises:
        ValueError: K and V are int8 without scales, or are not and have some.
    """
    if (scales is None) == (keys.dtype.itemsize == 1):
        raise ValueError(
            f"K and V of {keys.dtype} {'without' if scales is None else 'with'} scales"
        )
    return (None, None) if scales is None else scales


def scale_stride(scales: KvScales | None) -> int:
    """From a block's scales to the next block's."""
    return 0 if scales is None else scales[0].stride(0)
