"""Attention over the paged K/V pool: one query a sequence, or chunks of prompts.

Both go over tiles of keys with a running maximum and sum (FlashAttention, arXiv 2205.14135). Heads
that share K and V are lines of one tile. A decoding row's tiles are shared out over `splits`
programs according to its own length, and a second kernel puts their results together; how the
tiles are cut depends on the position and the number of splits alone.

Slots, positions, block tables and the K and V of earlier steps were there before the step began:
under programmatic dependent launch decoding rows read them without waiting for the kernel before,
and not from a cache of the processor's own, which may be older than the step. Rows of which several
are of one sequence (`siblings`) must not: the same kernel is then launched after all before it.

Nothing here allocates or synchronises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.cuda.rows import (
    emulated,
    in_order,
    launch_options,
    put_quantised,
    scale_planes,
    scale_stride,
    softcapped,
    to_half,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncllm.kernels.cuda.rows import KvScales, Quantised

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Below every score, and finite: a line that sees nothing in a tile must not become NaN.
_LOWEST: tl.constexpr = tl.constexpr(-1e30)
# Times the largest scale of what float16 can hold, 65504 / 127, it is still in float16's range.
_GAIN: tl.constexpr = tl.constexpr(64.0)


@triton.jit
def _product(a, b, acc, EMU: tl.constexpr):
    if EMU:
        # The interpreter multiplies bfloat16 as if it were whole numbers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _as(x, q, EMU: tl.constexpr):
    """`x` in the type of the queries."""
    if EMU:
        x = x.to(tl.float32)  # the interpreter makes no bfloat16 of int8
    return x.to(q.dtype)


@triton.jit
def _places(
    key, here, kv_head, table, ring, scale_stride,
    KH: tl.constexpr, HD: tl.constexpr, BT: tl.constexpr, RINGS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Where in the pool the head of each key begins, and where its scale is, int64.

    `here` says which keys exist.
    """
    number = key // BT
    if RINGS:
        number = number % ring
    if MASKED:
        block = tl.load(table + number, mask=here, other=0, cache_modifier=".cg")
    else:
        block = tl.load(table + number, cache_modifier=".cg")
    block = block.to(tl.int64)
    place = ((block * BT + key % BT) * KH + kv_head) * HD
    return place, block * scale_stride + kv_head * BT + key % BT


@triton.jit
def _absorb(
    acc, peak, total, q, query, k, v, k_scale, v_scale, key, here,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, EMU: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to what was seen so far; scales are of int8 K and V."""
    scores = _product(q, tl.trans(_as(k, q, EMU)), None, EMU)
    if k_scale is not None:
        scores *= k_scale[None, :]
    if CAP > 0:
        scores = softcapped(scores, CAP)
    scores *= _LOG2_E
    if MASKED:
        seen = here[None, :] & (key[None, :] <= query[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > query[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(peak - higher)
    if v_scale is not None:
        # For small scales: float16 has few digits left near 0. The sums are larger all the same.
        weights *= _GAIN
    total = total * shrunk + tl.sum(weights, 1)
    if v_scale is not None:
        weights *= v_scale[None, :]
    acc = _product(weights.to(q.dtype), _as(v, q, EMU), acc * shrunk[:, None], EMU)
    return acc, higher, total


@triton.jit
def _tile(
    acc, peak, total, q, query, kv_head, base, low, high, table, ring,
    keys, values, key_scales, value_scales, scale_stride,
    KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, RINGS: tl.constexpr, MASKED: tl.constexpr,
    EMU: tl.constexpr,
):  # fmt: skip
    """Add the keys from `base` on to what was seen so far; see `_tiles`."""
    i = tl.arange(0, P)
    inside = i < HD
    key = base + tl.arange(0, BK)
    here = (key >= low) & (key < high)
    place, scale_at = _places(
        key, here, kv_head, table, ring, scale_stride, KH, HD, BT, RINGS, MASKED
    )
    at = place[:, None] + i[None, :]
    # What is not loaded is 0: another sequence's leftovers may be NaN.
    if MASKED:
        wanted = here[:, None] & inside[None, :]
        k = tl.load(keys + at, mask=wanted, other=0.0)
        v = tl.load(values + at, mask=wanted, other=0.0)
    elif HD == P:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    else:
        k = tl.load(keys + at, mask=inside[None, :], other=0.0)
        v = tl.load(values + at, mask=inside[None, :], other=0.0)
    k_scale, v_scale = None, None
    if key_scales is not None:
        if MASKED:
            k_scale = tl.load(key_scales + scale_at, mask=here, other=0.0)
            v_scale = tl.load(value_scales + scale_at, mask=here, other=0.0)
        else:
            k_scale = tl.load(key_scales + scale_at)
            v_scale = tl.load(value_scales + scale_at)
    return _absorb(
        acc, peak, total, q, query, k, v, k_scale, v_scale, key, here, WINDOW, CAP, MASKED, EMU
    )


@triton.jit
def _tiles(
    acc, peak, total, q, query, kv_head, start, end, low, high, table, ring,
    keys, values, key_scales, value_scales, scale_stride,
    KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, RINGS: tl.constexpr, MASKED: tl.constexpr,
    EMU: tl.constexpr,
):  # fmt: skip
    """Go over keys `start` to `end`, of which those from `low` up to before `high` exist.

    `q`: [lines, P]; `query`: int32 [lines], their positions; `table`: the sequence's blocks.
    """
    if EMU:
        # The interpreter's range takes no bounds worked out in a kernel.
        base = start
        while base < end:
            acc, peak, total = _tile(
                acc, peak, total, q, query, kv_head, base, low, high, table, ring,
                keys, values, key_scales, value_scales, scale_stride,
                KH, HD, P, BT, BK, WINDOW, CAP, RINGS, MASKED, EMU,
            )  # fmt: skip
            base += BK
    else:
        for base in tl.range(start, end, BK):
            acc, peak, total = _tile(
                acc, peak, total, q, query, kv_head, base, low, high, table, ring,
                keys, values, key_scales, value_scales, scale_stride,
                KH, HD, P, BT, BK, WINDOW, CAP, RINGS, MASKED, EMU,
            )  # fmt: skip
    return acc, peak, total


@triton.jit
def _shares(position, used, SPLITS: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr):
    """The first key a row sees, its first tile, tiles of a split, and splits that have any."""
    low = 0
    if WINDOW > 0:
        low = tl.maximum(position - (WINDOW - 1), 0)
    first = low // BK
    tiles = tl.where(used, position // BK + 1 - first, 0)
    each = tl.maximum((tiles + SPLITS - 1) // SPLITS, 1)
    return low, first, each, (tiles + each - 1) // each


@triton.jit
def _decode(
    q, keys, values, key_scales, value_scales, tables, rings, slots, positions, partial, peaks,
    xq, xd, xs, half, out, table_stride, scale_stride,
    H: tl.constexpr, KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, LINES: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ORDERED: tl.constexpr,
    PDL: tl.constexpr, EMU: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row, cache_modifier=".cg")
    used = slot >= 0
    position = tl.where(used, tl.load(positions + row, cache_modifier=".cg"), -1)
    low, first, each, active = _shares(position, used, SPLITS, BK, WINDOW)
    i = tl.arange(0, P)
    inside = i < HD
    ring = 1
    if rings is not None:
        ring = tl.load(rings + slot, mask=used, other=0, cache_modifier=".cg")
        ring = tl.where(ring > 0, ring, 1 << 30)
    table = tables + tl.maximum(slot, 0).to(tl.int64) * table_stride
    start = (first + split * each) * BK
    end = tl.minimum(start + each * BK, position + 1)
    key = start + tl.arange(0, BK)
    here = (key >= low) & (key < end)
    place, scale_at = _places(
        key, here, kv_head, table, ring, scale_stride, KH, HD, BT, rings is not None, True
    )
    at = place[:, None] + i[None, :]
    # All keys but the row's own.
    earlier = here & (key < position)
    old = earlier[:, None] & inside[None, :]
    k = tl.load(keys + at, mask=old, other=0.0, cache_modifier=".cg")
    v = tl.load(values + at, mask=old, other=0.0, cache_modifier=".cg")
    k_scale, v_scale = None, None
    if key_scales is not None:
        k_scale = tl.load(key_scales + scale_at, mask=earlier, other=0.0, cache_modifier=".cg")
        v_scale = tl.load(value_scales + scale_at, mask=earlier, other=0.0, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    if split < active:
        newest = here & (key == position)
        own = newest[:, None] & inside[None, :]
        k = tl.where(own, tl.load(keys + at, mask=own, other=0.0), k)
        v = tl.where(own, tl.load(values + at, mask=own, other=0.0), v)
        if key_scales is not None:
            k_scale += tl.load(key_scales + scale_at, mask=newest, other=0.0)
            v_scale += tl.load(value_scales + scale_at, mask=newest, other=0.0)
        line = tl.arange(0, LINES)
        own_q = (row * H + kv_head * G + line)[:, None] * HD + i[None, :]
        lines = tl.load(q + own_q, mask=(line < G)[:, None] & inside[None, :], other=0.0)
        acc = tl.zeros([LINES, P], tl.float32)
        peak = tl.full([LINES], _LOWEST, tl.float32)
        total = tl.zeros([LINES], tl.float32)
        query = tl.full([LINES], 0, tl.int32) + position
        acc, peak, total = _absorb(
            acc, peak, total, lines, query, k, v, k_scale, v_scale, key, here,
            WINDOW, CAP, True, EMU,
        )  # fmt: skip
        acc, peak, total = _tiles(
            acc, peak, total, lines, query, kv_head, start + BK, end, low, position + 1,
            table, ring, keys, values, key_scales, value_scales, scale_stride,
            KH, HD, P, BT, BK, WINDOW, CAP, rings is not None, True, EMU,
        )  # fmt: skip
        if SPLITS == 1:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            _put_heads(
                acc, row + tl.zeros([LINES], tl.int64), kv_head * G + line, line < G,
                xq, xd, xs, half, out, H, HD, P, LINES, ORDERED,
            )  # fmt: skip
        else:
            # A place for each split of each line: [row, kv head, split, GP].
            spot = ((row * KH + kv_head) * SPLITS + split) * GP + line
            tl.store(partial + spot[:, None] * P + i[None, :], acc, mask=(line < G)[:, None])
            tl.store(peaks + spot * 2, peak, mask=line < G)
            tl.store(peaks + spot * 2 + 1, total, mask=line < G)
    elif SPLITS == 1:
        # A padding row: zeros.
        none = tl.arange(0, LINES)
        _put_heads(
            tl.zeros([LINES, P], tl.float32), row + tl.zeros([LINES], tl.int64),
            kv_head * G + none, none < G, xq, xd, xs, half, out, H, HD, P, LINES, ORDERED,
        )  # fmt: skip


@triton.jit
def _combine(
    slots, positions, partial, peaks, xq, xd, xs, half, out,
    H: tl.constexpr, KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, SC: tl.constexpr,
    WINDOW: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the splits of one head of a row have seen, together."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row, cache_modifier=".cg")
    used = slot >= 0
    position = tl.where(used, tl.load(positions + row, cache_modifier=".cg"), -1)
    active = _shares(position, used, SPLITS, BK, WINDOW)[3]
    base = (row * KH + head // G) * SPLITS * GP + head % G
    i = tl.arange(0, P)
    every = tl.arange(0, SP)
    if PDL:
        gdc_wait()
    mine = every < active
    tops = tl.load(peaks + (base + every * GP) * 2, mask=mine, other=_LOWEST)
    sums = tl.load(peaks + (base + every * GP) * 2 + 1, mask=mine, other=0.0)
    top = tl.max(tops, 0)
    divisor = tl.sum(tl.exp2(tops - top) * sums, 0)
    result = tl.zeros([P], tl.float32)
    for begin in tl.static_range(0, SP, SC):
        some = begin + tl.arange(0, SC)
        spot = base + some * GP
        there = some < active
        peak = tl.load(peaks + spot * 2, mask=there, other=_LOWEST)
        share = tl.where(there, tl.exp2(peak - top), 0.0)
        part = tl.load(partial + spot[:, None] * P + i[None, :], mask=there[:, None], other=0.0)
        result += tl.sum(part * share[:, None], 0)
    # 0 only where the row is none.
    result = result / tl.where(divisor == 0.0, 1.0, divisor)
    nothing = tl.zeros([1], tl.int64)
    _put_heads(
        result[None, :], row + nothing, head + tl.zeros([1], tl.int32), nothing == 0,
        xq, xd, xs, half, out, H, HD, P, 1, ORDERED,
    )  # fmt: skip


@triton.jit
def _put_heads(
    v, row, head, keep, xq, xd, xs, half, out,
    H: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, LINES: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Write lines [LINES, P], each a head of a row, in every form that is asked for."""
    i = tl.arange(0, P)
    inside = keep[:, None] & (i < HD)[None, :]
    at = (row * H + head)[:, None] * HD + i[None, :]
    if half is not None:
        placed = (row * H + head)[:, None] * HD + in_order(i, ORDERED)[None, :]
        tl.store(half + placed, to_half(v, half), mask=inside)
    if out is not None:
        tl.store(out + at, v, mask=inside)
    if xq is not None:
        # [lines, runs of 32]: the same index for all of a run.
        runs: tl.constexpr = P // 32
        run = tl.arange(0, runs)[None, :]
        nothing = tl.zeros([LINES, runs], tl.int32)
        rows = tl.reshape(row[:, None] + nothing, [LINES * runs])
        blocks = tl.reshape(head[:, None] * (HD // 32) + run + nothing, [LINES * runs])
        wanted = tl.reshape(keep[:, None] & (run + nothing < HD // 32), [LINES * runs])
        put_quantised(tl.reshape(v, [LINES * runs, 32]), rows, blocks, wanted, xq, xd, xs, H * HD)


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """What the splits of decoding rows leave for each other; one may serve every layer.

    Attributes:
        splits: into how many programs a row's keys are shared out at most.
        partial: float32, flat: weighted sums of values.
        peaks: float32, flat: each line's largest score, and the sum of its weights.
    """

    splits: int
    partial: Tensor
    peaks: Tensor

    @classmethod
    def of(
        cls,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        splits: int,
        device: torch.device | str,
    ) -> DecodeScratch:
        """Working memory for up to `rows` rows."""
        import torch

        lines = rows * kv_heads * splits * triton.next_power_of_2(heads // kv_heads)
        return cls(
            splits,
            torch.zeros(lines * triton.next_power_of_2(head_dim), device=device),
            torch.zeros(lines * 2, device=device),
        )


def decode_splits(rows: int, kv_heads: int, max_context: int, programs: int = 264) -> int:
    """Into how many programs to share out a row's keys to keep the device busy, a power of two.

    Args:
        rows: of the batch.
        kv_heads: of the model.
        max_context: tokens a sequence may have.
        programs: that a device is to have at once.
    """
    wanted = max(1, programs // (rows * kv_heads))
    longest = max(1, max_context // 64)
    return 1 << (min(wanted, longest, 64).bit_length() - 1)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rings: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    scratch: DecodeScratch,
    *,
    window: int | None = None,
    cap: float = 0.0,
    quantised: Quantised | None = None,
    half: Tensor | None = None,
    ordered: bool = False,
    out: Tensor | None = None,
    scales: KvScales | None = None,
    tile: int | None = None,
    siblings: bool = False,
    pdl: bool = False,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Attention of one query for each row, whose own K and V are in the pool already.

    Args:
        q: float16 or bfloat16 [M, heads, head_dim], scaled.
        keys: [blocks, block_tokens, kv_heads, head_dim].
        values: likewise.
        tables: int32 [max_seqs, max_blocks].
        rings: int32 [max_seqs], blocks of each sequence's ring, 0: none; `None`: no rings at all.
        slots: int32 [M], the sequence of each row; below 0: only padding, the result is 0.
        positions: int32 [M].
        scratch: for as many rows.
        window: tokens a query sees, itself included; `None`: all.
        cap: softcap of the scores; 0: none.
        quantised: the result as int8 rows of heads * head_dim; head_dim is a multiple of 32.
        half: the result as float16 or bfloat16.
        ordered: `half` is for `tensor_rows`, its columns in that order.
        out: the result as float32.
        scales: of int8 K and V.
        tile: keys taken at a time, a power of two.
        siblings: rows may see K and V that the step itself has written for others of them.
        pdl: programmatic dependent launch.
        warps: of a program.
        stages: tiles that are loaded ahead.
    """
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    padded, grouped = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    splits, size = scratch.splits, tile or (64 if padded <= 128 else 32)
    forms = (*_planes(quantised, head_dim), half, out)
    shape = {
        "H": heads, "KH": kv_heads, "HD": head_dim, "P": padded, "G": group, "GP": grouped,
        "BK": size, "SPLITS": splits, "WINDOW": window or 0, "ORDERED": ordered,
        "PDL": pdl,
    }  # fmt: skip
    _decode[(splits, kv_heads, rows)](
        q, keys, values, *scale_planes(keys, scales), tables, rings, slots, positions,
        scratch.partial, scratch.peaks, *forms, tables.stride(0), scale_stride(scales),
        LINES=max(16, grouped), BT=keys.shape[1], CAP=float(cap), EMU=emulated(),
        num_warps=warps, num_stages=stages, **shape, **launch_options(pdl and not siblings),
    )  # fmt: skip
    if splits > 1:
        together = triton.next_power_of_2(splits)
        _combine[(heads, rows)](
            slots, positions, scratch.partial, scratch.peaks, *forms,
            SP=together, SC=min(together, 4096 // padded), num_warps=4, **shape,
            **launch_options(pdl),
        )  # fmt: skip


@triton.jit
def _prefill(
    q, keys, values, key_scales, value_scales, tables, rings, spans,
    xq, xd, xs, half, out, table_stride, scale_stride,
    H: tl.constexpr, KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
    EMU: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    # The last rows of a chunk see most keys: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    span = spans + tl.program_id(2) * 4
    if PDL:
        gdc_wait()
    first_row, count = tl.load(span), tl.load(span + 1)
    offset, slot = tl.load(span + 2), tl.load(span + 3)
    rows: tl.constexpr = BQ // GP
    begin = tile * rows
    if begin < count:
        line = tl.arange(0, BQ)
        index = begin + line // GP  # of the row within its chunk
        group = line % GP
        keep = (index < count) & (group < G)
        row = (first_row + index).to(tl.int64)
        head = kv_head * G + group
        query = offset + index
        i = tl.arange(0, P)
        at = (row * H + head)[:, None] * HD + i[None, :]
        lines = tl.load(q + at, mask=keep[:, None] & (i < HD)[None, :], other=0.0)

        ring = 1
        if rings is not None:
            ring = tl.load(rings + slot)
            ring = tl.where(ring > 0, ring, 1 << 30)
        table = tables + slot.to(tl.int64) * table_stride
        newest = offset + tl.minimum(begin + rows, count) - 1
        oldest = offset + begin  # the first query
        low = 0
        whole = 0  # tiles from here on are seen by every query ...
        if WINDOW > 0:
            low = tl.maximum(oldest - (WINDOW - 1), 0)
            whole = (tl.maximum(newest - (WINDOW - 1), 0) + BK - 1) // BK * BK
        start = low // BK * BK
        until = (oldest + 1) // BK * BK  # ... up to here
        whole = tl.minimum(whole, newest + 1)
        acc = tl.zeros([BQ, P], tl.float32)
        peak = tl.full([BQ], _LOWEST, tl.float32)
        total = tl.zeros([BQ], tl.float32)
        if WINDOW > 0:
            acc, peak, total = _tiles(
                acc, peak, total, lines, query, kv_head, start, whole, low, newest + 1,
                table, ring, keys, values, key_scales, value_scales, scale_stride,
                KH, HD, P, BT, BK, WINDOW, CAP, rings is not None, True, EMU,
            )  # fmt: skip
        acc, peak, total = _tiles(
            acc, peak, total, lines, query, kv_head, whole, until, low, newest + 1,
            table, ring, keys, values, key_scales, value_scales, scale_stride,
            KH, HD, P, BT, BK, WINDOW, CAP, rings is not None, False, EMU,
        )  # fmt: skip
        acc, peak, total = _tiles(
            acc, peak, total, lines, query, kv_head, tl.maximum(whole, until), newest + 1,
            low, newest + 1, table, ring, keys, values, key_scales, value_scales, scale_stride,
            KH, HD, P, BT, BK, WINDOW, CAP, rings is not None, True, EMU,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        _put_heads(acc, row, head, keep, xq, xd, xs, half, out, H, HD, P, BQ, ORDERED)


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rings: Tensor | None,
    spans: Tensor,
    longest: int,
    *,
    window: int | None = None,
    cap: float = 0.0,
    quantised: Quantised | None = None,
    half: Tensor | None = None,
    ordered: bool = False,
    out: Tensor | None = None,
    scales: KvScales | None = None,
    lines: int | None = None,
    tile: int | None = None,
    pdl: bool = False,
    warps: int | None = None,
    stages: int = 2,
) -> None:
    """Causal attention of chunks of prompts, whose own K and V are in the pool already.

    Args:
        q: float16 or bfloat16 [rows, heads, head_dim], scaled.
        keys: [blocks, block_tokens, kv_heads, head_dim].
        values: likewise.
        tables: int32 [max_seqs, max_blocks].
        rings: int32 [max_seqs], blocks of each sequence's ring, 0: none; `None`: no rings at all.
        spans: int32 [chunks, 4]: first row, rows, position of the first row, slot; 0 rows: unused.
        longest: rows of a chunk at most.
        window: tokens a query sees, itself included; `None`: all.
        cap: softcap of the scores; 0: none.
        quantised: the result as int8 rows of heads * head_dim; head_dim is a multiple of 32.
        half: the result as float16 or bfloat16.
        ordered: `half` is for `tensor_rows`, its columns in that order.
        out: the result as float32. Rows of no chunk are not written in any form.
        scales: of int8 K and V.
        lines: rows times heads of a program, a power of two.
        tile: keys taken at a time, a power of two.
        pdl: programmatic dependent launch.
        warps: of a program.
        stages: tiles that are loaded ahead.
    """
    _, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    padded, grouped = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    lines = max(lines or 128, grouped)
    xq, xd, xs = _planes(quantised, head_dim)
    _prefill[(triton.cdiv(longest, lines // grouped), kv_heads, spans.shape[0])](
        q, keys, values, *scale_planes(keys, scales), tables, rings, spans,
        xq, xd, xs, half, out, tables.stride(0), scale_stride(scales),
        H=heads, KH=kv_heads, HD=head_dim, P=padded, G=group, GP=grouped,
        BQ=lines, BT=keys.shape[1], BK=tile or (64 if padded <= 128 else 32),
        WINDOW=window or 0, CAP=float(cap), ORDERED=ordered, PDL=pdl, EMU=emulated(),
        num_warps=warps or (8 if lines >= 128 else 4), num_stages=stages, **launch_options(pdl),
    )  # fmt: skip


def _planes(quantised: Quantised | None, head_dim: int) -> tuple[Tensor | None, ...]:
    if quantised is None:
        return None, None, None
    if head_dim % 32:
        raise ValueError(
            f"heads of {head_dim}: runs of 32 would cross them; write float rows and quantise them"
        )
    return quantised
