"""Attention over the paged K/V pool: one query a sequence, or chunks of prompts.

Both go over tiles of keys with a running maximum and sum (FlashAttention, arXiv 2205.14135). Heads
that share K and V are lines of one tile. A decoding row's tiles are shared out over `splits`
programs according to its own length, and whichever of them ends last puts their results together;
how the tiles are cut depends on the position alone, so a row's result does not depend on its batch.

Nothing here allocates or synchronises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.cuda.rows import (
    byte_view,
    emulated,
    launch_options,
    put_quantised,
    softcapped,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncllm.kernels.cuda.rows import Quantised

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Below every score, and finite: a line that sees nothing in a tile must not become NaN.
_LOWEST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def _product(a, b, acc, EMU: tl.constexpr):
    if EMU:
        # The interpreter multiplies bfloat16 as if it were whole numbers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _tile(
    acc, peak, total, q, query, kv_head, base, low, high, table, ring, keys, values,
    KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, RINGS: tl.constexpr, MASKED: tl.constexpr,
    EMU: tl.constexpr,
):  # fmt: skip
    """Add the keys from `base` on to what was seen so far; see `_tiles`."""
    i = tl.arange(0, P)
    inside = i < HD
    key = base + tl.arange(0, BK)
    number = key // BT
    if RINGS:
        number = number % ring
    if MASKED:
        here = (key >= low) & (key < high)
        block = tl.load(table + number, mask=here, other=0)
    else:
        block = tl.load(table + number)
    place = ((block.to(tl.int64) * BT + key % BT) * KH + kv_head) * HD
    at = place[:, None] + i[None, :]
    # What is not loaded is 0: another sequence's leftovers may be NaN.
    if MASKED:
        wanted = here[:, None] & inside[None, :]
        k = tl.load(keys + at, mask=wanted, other=0.0).to(q.dtype)
        v = tl.load(values + at, mask=wanted, other=0.0).to(q.dtype)
    elif HD == P:
        k = tl.load(keys + at).to(q.dtype)
        v = tl.load(values + at).to(q.dtype)
    else:
        k = tl.load(keys + at, mask=inside[None, :], other=0.0).to(q.dtype)
        v = tl.load(values + at, mask=inside[None, :], other=0.0).to(q.dtype)
    scores = _product(q, tl.trans(k), None, EMU)
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
    total = total * shrunk + tl.sum(weights, 1)
    acc = _product(weights.to(q.dtype), v, acc * shrunk[:, None], EMU)
    return acc, higher, total


@triton.jit
def _tiles(
    acc, peak, total, q, query, kv_head, start, end, low, high, table, ring, keys, values,
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
                acc, peak, total, q, query, kv_head, base, low, high, table, ring, keys, values,
                KH, HD, P, BT, BK, WINDOW, CAP, RINGS, MASKED, EMU,
            )  # fmt: skip
            base += BK
    else:
        for base in tl.range(start, end, BK):
            acc, peak, total = _tile(
                acc, peak, total, q, query, kv_head, base, low, high, table, ring, keys, values,
                KH, HD, P, BT, BK, WINDOW, CAP, RINGS, MASKED, EMU,
            )  # fmt: skip
    return acc, peak, total


@triton.jit
def _decode(
    q, keys, values, tables, rings, slots, positions, partial, peaks, counters,
    xq, xd, xs, half, out, table_stride,
    H: tl.constexpr, KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, LINES: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, SP: tl.constexpr, SC: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, PDL: tl.constexpr, EMU: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()
    slot = tl.load(slots + row)
    used = slot >= 0
    position = tl.where(used, tl.load(positions + row), -1)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(position - (WINDOW - 1), 0)
    first = low // BK
    tiles = position // BK + 1 - first
    tiles = tl.where(used, tiles, 0)
    per = tl.maximum((tiles + SPLITS - 1) // SPLITS, 1)
    active = (tiles + per - 1) // per
    i = tl.arange(0, P)
    ring = 1
    if rings is not None:
        ring = tl.load(rings + slot, mask=used, other=0)
        ring = tl.where(ring > 0, ring, 1 << 30)
    # A place for each split of each line: [row, kv head, split, GP].
    base = (row * KH + kv_head) * SPLITS
    last = (active == 0) & (split == 0)  # a padding row: zeros
    if split < active:
        line = tl.arange(0, LINES)
        at = (row * H + kv_head * G + line)[:, None] * HD + i[None, :]
        query = tl.load(q + at, mask=(line < G)[:, None] & (i < HD)[None, :], other=0.0)
        acc = tl.zeros([LINES, P], tl.float32)
        peak = tl.full([LINES], _LOWEST, tl.float32)
        total = tl.zeros([LINES], tl.float32)
        start = (first + split * per) * BK
        end = tl.minimum(start + per * BK, position + 1)
        acc, peak, total = _tiles(
            acc, peak, total, query, tl.full([LINES], 0, tl.int32) + position, kv_head,
            start, end, low, position + 1, tables + slot.to(tl.int64) * table_stride, ring,
            keys, values, KH, HD, P, BT, BK, WINDOW, CAP, rings is not None, True, EMU,
        )  # fmt: skip
        spot = (base + split) * GP + line
        tl.store(partial + spot[:, None] * P + i[None, :], acc, mask=(line < G)[:, None])
        tl.store(peaks + spot * 2, peak, mask=line < G)
        tl.store(peaks + spot * 2 + 1, total, mask=line < G)
        tl.debug_barrier()
        last = active == 1
        if active > 1:
            before = tl.atomic_add(counters + row * KH + kv_head, 1, sem="acq_rel")
            last = before == active - 1
    if last:
        group = tl.arange(0, GP)
        every = tl.arange(0, SP)
        # Other programs wrote these: not from this one's cache.
        places = (base + every)[:, None] * GP + group[None, :]
        mine = (every < active)[:, None] & (group < G)[None, :]
        tops = tl.load(peaks + places * 2, mask=mine, other=_LOWEST, cache_modifier=".cg")
        sums = tl.load(peaks + places * 2 + 1, mask=mine, other=0.0, cache_modifier=".cg")
        top = tl.max(tops, 0)
        divisor = tl.sum(tl.exp2(tops - top[None, :]) * sums, 0)
        result = tl.zeros([GP, P], tl.float32)
        begin = active * 0
        while begin < active:
            some = begin + tl.arange(0, SC)
            place = (base + some)[:, None] * GP + group[None, :]
            there = (some < active)[:, None] & (group < G)[None, :]
            peak_there = tl.load(peaks + place * 2, mask=there, other=_LOWEST, cache_modifier=".cg")
            share = tl.where(there, tl.exp2(peak_there - top[None, :]), 0.0)
            at_there = place[:, :, None] * P + i[None, None, :]
            part = tl.load(
                partial + at_there, mask=there[:, :, None], other=0.0, cache_modifier=".cg"
            )
            result += tl.sum(part * share[:, :, None], 0)
            begin += SC
        # 0 only where a line is none, or of a padding row.
        result = result / tl.where(divisor == 0.0, 1.0, divisor)[:, None]
        _put_heads(
            result, row + tl.zeros([GP], tl.int64), kv_head * G + group, group < G,
            xq, xd, xs, half, out, H, HD, P, GP,
        )  # fmt: skip
        if active > 1:
            tl.store(counters + row * KH + kv_head, 0)


@triton.jit
def _put_heads(
    v, row, head, keep, xq, xd, xs, half, out,
    H: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Write lines [LINES, P], each a head of a row, in every form that is asked for."""
    i = tl.arange(0, P)
    inside = keep[:, None] & (i < HD)[None, :]
    at = (row * H + head)[:, None] * HD + i[None, :]
    if half is not None:
        tl.store(half + at, v.to(half.dtype.element_ty), mask=inside)
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
        counters: int32 [rows * kv_heads], 0 between launches.
    """

    splits: int
    partial: Tensor
    peaks: Tensor
    counters: Tensor

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
            torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        )


def decode_splits(rows: int, kv_heads: int, max_context: int, processors: int = 132) -> int:
    """Into how many programs to share out a row's keys to keep the device busy, a power of two."""
    wanted = max(1, processors // (rows * kv_heads))
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
    out: Tensor | None = None,
    tile: int | None = None,
    pdl: bool = False,
    warps: int = 4,
    stages: int = 2,
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
        out: the result as float32.
        tile: keys taken at a time, a power of two.
        pdl: programmatic dependent launch.
        warps: of a program.
        stages: tiles that are loaded ahead.
    """
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    padded, grouped = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    splits = scratch.splits
    xq, xd, xs = _planes(quantised, head_dim)
    _decode[(splits, kv_heads, rows)](
        q, keys, values, tables, rings, slots, positions,
        scratch.partial, scratch.peaks, scratch.counters, xq, xd, xs, half, out, tables.stride(0),
        H=heads, KH=kv_heads, HD=head_dim, P=padded, G=group, GP=grouped,
        LINES=max(16, grouped), BT=keys.shape[1], BK=tile or (64 if padded <= 128 else 32),
        SPLITS=splits, SP=triton.next_power_of_2(splits),
        SC=max(1, min(triton.next_power_of_2(splits), 4096 // (grouped * padded))),
        WINDOW=window or 0, CAP=float(cap), PDL=pdl, EMU=emulated(),
        num_warps=warps, num_stages=stages, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _prefill(
    q, keys, values, tables, rings, spans, xq, xd, xs, half, out, table_stride,
    H: tl.constexpr, KH: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr, EMU: tl.constexpr,
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
                table, ring, keys, values,
                KH, HD, P, BT, BK, WINDOW, CAP, rings is not None, True, EMU,
            )  # fmt: skip
        acc, peak, total = _tiles(
            acc, peak, total, lines, query, kv_head, whole, until, low, newest + 1,
            table, ring, keys, values,
            KH, HD, P, BT, BK, WINDOW, CAP, rings is not None, False, EMU,
        )  # fmt: skip
        acc, peak, total = _tiles(
            acc, peak, total, lines, query, kv_head, tl.maximum(whole, until), newest + 1,
            low, newest + 1, table, ring, keys, values,
            KH, HD, P, BT, BK, WINDOW, CAP, rings is not None, True, EMU,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        _put_heads(acc, row, head, keep, xq, xd, xs, half, out, H, HD, P, BQ)


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
    out: Tensor | None = None,
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
        out: the result as float32. Rows of no chunk are not written in any form.
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
        q, keys, values, tables, rings, spans, xq, xd, xs, half, out, tables.stride(0),
        H=heads, KH=kv_heads, HD=head_dim, P=padded, G=group, GP=grouped,
        BQ=lines, BT=keys.shape[1], BK=tile or (64 if padded <= 128 else 32),
        WINDOW=window or 0, CAP=float(cap), PDL=pdl, EMU=emulated(),
        num_warps=warps or (8 if lines >= 128 else 4), num_stages=stages, **launch_options(pdl),
    )  # fmt: skip


def _planes(quantised: Quantised | None, head_dim: int) -> tuple[Tensor | None, ...]:
    if quantised is None:
        return None, None, None
    if head_dim % 32:
        raise ValueError(
            f"heads of {head_dim}: runs of 32 would cross them; write float rows and quantise them"
        )
    xq, xd, xs = quantised
    return byte_view(xq), xd, xs
