"""Choosing a token from logits: the most likely one, or by chance among what filters leave.

The same choice as `sampling/filters.py` makes in float64, with weights of float32 precision here: a
draw that falls within a millionth of the border between two tokens may fall on the other side. A
row's choice depends on nothing but the row.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numba
from llvmlite import ir
from numba.core import types

from asyncllm.kernels.cpu import step as s
from asyncllm.kernels.cpu import vectors as v
from asyncllm.kernels.cpu.memory import (
    load_f32,
    load_f64,
    load_i64,
    store_f32,
    store_i64,
)
from asyncllm.kernels.cpu.rows import function, index_of_largest, softcapped

C = s.CHOICE
DRAW_BYTES: Final = 64
# Of a draw, float64 each.
TEMPERATURE: Final = 0
TOP_K: Final = 8
TOP_P: Final = 16
MIN_P: Final = 24
UNIFORM: Final = 32

_SIXTEENS: Final = 16  # of a block whose sum is kept
_FIRST_CUT: Final = 1e-2  # candidates weigh at least this, next to the most likely token
_LOWER: Final = 1e-2  # by which the cut is lowered where they are too few
_LOWEST: Final = 1e-30


@function(types.void, types.int64, types.float32, types.float32, types.float32, *[types.int64] * 2)
def _weigh(b: Any, x: Any, peak: Any, inverse: Any, least: Any, out: Any, count: Any) -> None:
    """`out = e ** ((x - peak) * inverse)`, or 0 where that is below `least`."""
    peak, inverse, least = (v.splat(b, each, v.V16F) for each in (peak, inverse, least))
    zero = v.constant(v.V16F, 0.0)
    with v.counted(b, count) as i:
        place = v.times(b, i, 64)
        value = b.fsub(v.load(b, b.add(x, place), v.V16F, 4), peak)
        weight = v.exponential(b, b.fmul(value, inverse))
        kept = b.fcmp_ordered(">=", weight, least)
        v.store(b, b.select(kept, weight, zero), b.add(out, place), 4)


@function(types.float32, types.int64, types.int64)
def _sum(b: Any, x: Any, count: Any) -> Any:
    sums = v.variable(b, v.constant(v.V16F, 0.0))
    with v.counted(b, count) as i:
        at = b.add(x, v.times(b, i, 64))
        b.store(b.fadd(b.load(sums), v.load(b, at, v.V16F, 4)), sums)
    return v.total(b, b.load(sums))


@function(types.int64, types.int64, types.float32, types.int64, types.int64)
def _gather(b: Any, weights: Any, least: Any, count: Any, out: Any) -> Any:
    """Keys of all weights from `least` on; returns how many. See `_key`."""
    found = v.variable(b, ir.Constant(v.I64, 0))
    bound = v.splat(b, least, v.V16F)
    with v.counted(b, count) as i:
        base = v.times(b, i, 16)
        values = v.load(b, b.add(weights, v.times(b, i, 64)), v.V16F, 4)
        heavy = b.fcmp_ordered(">=", values, bound)
        mask = b.bitcast(heavy, ir.IntType(16))
        with b.if_then(b.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(16), 0)), likely=False):
            for lane in range(16):
                with b.if_then(b.extract_element(heavy, ir.Constant(v.I32, lane))):
                    bits = b.bitcast(b.extract_element(values, ir.Constant(v.I32, lane)), v.I32)
                    token = v.plus(b, base, lane)
                    high = b.shl(b.zext(bits, v.I64), ir.Constant(v.I64, 32))
                    key = b.or_(high, b.sub(ir.Constant(v.I64, (1 << 32) - 1), token))
                    place = b.load(found)
                    v.store(b, key, b.add(out, v.times(b, place, 8)), 8)
                    b.store(v.plus(b, place, 1), found)
    return b.load(found)


@numba.njit(nogil=True)
def _sink(keys: int, root: int, count: int) -> None:
    """Restore a heap whose root may be too large: every key is at most its children."""
    key = load_i64(keys + 8 * root)
    while 2 * root + 1 < count:
        child = 2 * root + 1
        if child + 1 < count and load_i64(keys + 8 * child + 8) < load_i64(keys + 8 * child):
            child += 1
        smaller = load_i64(keys + 8 * child)
        if key <= smaller:
            break
        store_i64(keys + 8 * root, smaller)
        root = child
    store_i64(keys + 8 * root, key)


@numba.njit(nogil=True)
def _sort_down(keys: int, count: int) -> None:
    """Sort keys, the largest first."""
    for root in range(count // 2 - 1, -1, -1):
        _sink(keys, root, count)
    for last in range(count - 1, 0, -1):
        smallest = load_i64(keys)
        store_i64(keys, load_i64(keys + 8 * last))
        store_i64(keys + 8 * last, smallest)
        _sink(keys, 0, last)


@numba.njit(nogil=True)
def _token(key: int) -> int:
    """Of a key: a weight's bits, then the token's complement, so that the lower of equals leads."""
    return (1 << 32) - 1 - (key & ((1 << 32) - 1))


@numba.njit(nogil=True)
def _draw_any(weights: int, sixteens: int, sums: int, uniform: float) -> int:
    """A token by weight, in the vocabulary's order; `sums` has room for the sums of blocks."""
    blocks = (sixteens + _SIXTEENS - 1) // _SIXTEENS
    total = 0.0
    for block in range(blocks):
        count = min(_SIXTEENS, sixteens - block * _SIXTEENS)
        part = _sum(weights + 64 * _SIXTEENS * block, count)
        store_f32(sums + 4 * block, part)
        total += part
    wanted, before = uniform * total, 0.0
    token = 0
    for block in range(blocks):
        part = load_f32(sums + 4 * block)
        # Rounding may leave the walk through a block short of its sum: then the next one follows.
        if before + part > wanted:
            inner = before
            for index in range(16 * min(_SIXTEENS, sixteens - block * _SIXTEENS)):
                place = 16 * _SIXTEENS * block + index
                weight = load_f32(weights + 4 * place)
                if weight > 0:
                    token = place
                    inner += weight
                    if inner > wanted:
                        return token
        before += part
    return token


@numba.njit(nogil=True)
def _candidates(
    weights: int, sixteens: int, vocabulary: int, top_k: int, top_p: float, keys: int
) -> int:
    """Sorted keys of the tokens that top_k and top_p leave; returns how many."""
    total = 0.0
    for block in range((sixteens + _SIXTEENS - 1) // _SIXTEENS):
        count = min(_SIXTEENS, sixteens - block * _SIXTEENS)
        total += _sum(weights + 64 * _SIXTEENS * block, count)
    least, count = _FIRST_CUT, 0
    while True:
        count = _gather(weights, numba.float32(least), sixteens, keys)
        if least <= _LOWEST or count >= top_k:
            break
        if top_k >= vocabulary:
            held = 0.0
            for index in range(count):
                held += load_f32(weights + 4 * _token(load_i64(keys + 8 * index)))
            # A little more than is needed, so that rounding cannot make it too few.
            if held >= min(1.0, top_p * 1.000001) * total:
                break
        least = max(_LOWEST, least * _LOWER)
    _sort_down(keys, count)
    if top_k < count:
        count = top_k
    if top_k < vocabulary:
        total = 0.0
        for index in range(count):
            total += load_f32(weights + 4 * _token(load_i64(keys + 8 * index)))
    before, kept = 0.0, 0
    while kept < count and before < top_p * total:
        before += load_f32(weights + 4 * _token(load_i64(keys + 8 * kept)))
        kept += 1
    return kept


@numba.njit(nogil=True)
def _draw_kept(weights: int, keys: int, count: int, uniform: float) -> int:
    """A token by weight among those of the keys, in the vocabulary's order."""
    total = 0.0
    for index in range(count):
        token = _token(load_i64(keys + 8 * index))
        total += load_f32(weights + 4 * token)
        store_i64(keys + 8 * index, -token)
    _sort_down(keys, count)
    before, token = 0.0, 0
    for index in range(count):
        token = -load_i64(keys + 8 * index)
        before += load_f32(weights + 4 * token)
        if before > uniform * total:
            break
    return token


def scratch_bytes(vocabulary: int) -> int:
    """Working memory for one row: weights, keys, sums of blocks."""
    padded = -(-vocabulary // 16) * 16
    return 4 * padded + 8 * padded + 4 * (padded // 256 + 1)


def choice() -> Any:
    """The kernel: cap a row's logits, then choose. -1 where the logits are no numbers.

    Beside the token it leaves its logit.
    """

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        logits = load_i64(p + C.logits) + unit * load_i64(p + C.stride)
        count, padded = load_i64(p + C.count), load_i64(p + C.padded)
        cap = load_f32(p + C.softcap)
        if cap != 0:
            softcapped(logits, cap, padded // 16)
        chosen = index_of_largest(logits, count)
        turn = load_i64(step + s.WORD * s.TURN) % 2
        draw = load_i64(p + C.draws) + turn * load_i64(p + C.draws_stride) + unit * DRAW_BYTES
        temperature = load_f64(draw + TEMPERATURE)
        if chosen >= 0 and temperature > 0:
            peak = load_f32(logits + 4 * chosen)
            if math.isfinite(peak):
                sixteens = (count + 15) // 16
                # What lies beyond the vocabulary, padding, must not be drawn.
                for place in range(count, 16 * sixteens):
                    store_f32(logits + 4 * place, numba.float32(-math.inf))
                weights = load_i64(p + C.scratch) + thread * load_i64(p + C.scratch_stride)
                keys = weights + 64 * sixteens
                sums = keys + 128 * sixteens
                inverse = numba.float32(1.0 / temperature)
                least = numba.float32(max(load_f64(draw + MIN_P), _LOWEST))
                _weigh(logits, peak, inverse, least, weights, sixteens)
                top_k, top_p = int(load_f64(draw + TOP_K)), load_f64(draw + TOP_P)
                uniform = load_f64(draw + UNIFORM)
                if top_k >= count and top_p >= 1:
                    chosen = _draw_any(weights, sixteens, sums, uniform)
                else:
                    kept = _candidates(weights, sixteens, count, top_k, top_p, keys)
                    chosen = _draw_kept(weights, keys, kept, uniform)
        tokens = load_i64(p + C.tokens) + turn * load_i64(p + C.tokens_stride)
        peaks = load_i64(p + C.peaks) + turn * load_i64(p + C.peaks_stride)
        store_i64(tokens + 8 * unit, chosen)
        peak = load_f32(logits + 4 * chosen) if chosen >= 0 else numba.float32(math.nan)
        store_f32(peaks + 4 * unit, peak)

    return kernel
