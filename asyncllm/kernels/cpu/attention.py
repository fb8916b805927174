"""Attention over the paged cache: scores, and sums of values, for several queries at once.

Of a block the keys of one head lie as [16 keys together][head_dim][16 keys], so that 16 scores grow
side by side, and the values as [tokens][head_dim]. Groups of 16 keys begin at multiples of 16
positions, and everything is added up in the order of positions: a query's result does not depend on
the chunk it came in.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from asyncllm.kernels.cpu import vectors as v
from asyncllm.kernels.cpu.isa import Isa

KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
KV_KINDS = tuple(KV_BYTES)
KEYS = 16


def _narrowed(b: Any, isa: Isa, kind: str, value: Any) -> Any:
    if kind == "float32":
        return value
    return v.narrowed(b, isa, value) if kind == "float16" else v.bfloat_narrowed(b, value)


def _loaded(b: Any, isa: Isa, kind: str, address: Any) -> Any:
    if kind == "float32":
        return v.load(b, address, v.V16F, 4)
    if kind == "float16":
        return v.widened(b, isa, v.load(b, address, v.V16H, 2))
    return v.bfloat_widened(b, v.load(b, address, v.V16S, 2))


@intrinsic(prefer_literal=True)
def put_key(context: Any, isa: Any, kind: Any, x: Any, target: Any, elements: Any) -> Any:
    """Write a key, float32 [elements], into its place among 16: every sixteenth element."""
    kinds = (isa, kind)
    form, name = Isa(isa.literal_value), KV_KINDS[kind.literal_value]

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, target, elements = arguments[2:]
        size = KV_BYTES[name]
        with v.counted(b, b.udiv(elements, ir.Constant(v.I64, 16))) as i:
            value = v.load(b, b.add(x, v.times(b, i, 64)), v.V16F, 4)
            value = _narrowed(b, form, name, value)
            at = b.add(target, v.times(b, i, 16 * KEYS * size))
            for lane in range(16):
                one = b.extract_element(value, ir.Constant(v.I32, lane))
                v.store(b, one, v.plus(b, at, lane * KEYS * size), size)
        return context.get_dummy_value()

    return types.void(*kinds, *[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def put_value(context: Any, isa: Any, kind: Any, x: Any, target: Any, elements: Any) -> Any:
    """Write a value, float32 [elements], into its row of the pool."""
    kinds = (isa, kind)
    form, name = Isa(isa.literal_value), KV_KINDS[kind.literal_value]

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, target, elements = arguments[2:]
        size = KV_BYTES[name]
        with v.counted(b, b.udiv(elements, ir.Constant(v.I64, 16))) as i:
            value = v.load(b, b.add(x, v.times(b, i, 64)), v.V16F, 4)
            at = b.add(target, v.times(b, i, 16 * size))
            v.store(b, _narrowed(b, form, name, value), at, size)
        return context.get_dummy_value()

    return types.void(*kinds, *[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def scores(
    context: Any, isa: Any, kind: Any, queries: Any, q: Any, places: Any, groups: Any,
    elements: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Dot products of a fixed number of queries with groups of 16 keys.

    `q`: float32 [queries, elements]; `places`: addresses of the groups' keys; `out`: float32, a row
    of `out_stride` bytes for each query.
    """
    literals = (isa, kind, queries)
    form, name, count = Isa(isa.literal_value), KV_KINDS[kind.literal_value], queries.literal_value

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        q, places, groups, elements, out, out_stride = arguments[3:]
        size = KV_BYTES[name]
        query_bytes = v.times(b, elements, 4)
        rows = [b.add(q, b.mul(query_bytes, ir.Constant(v.I64, n))) for n in range(count)]
        outs = [b.add(out, b.mul(out_stride, ir.Constant(v.I64, n))) for n in range(count)]
        zero = v.constant(v.V16F, 0.0)
        # Even and odd elements apart: two chains of additions hide each other's latency.
        sums = [[v.variable(b, zero) for _ in range(2)] for _ in range(count)]
        with v.counted(b, groups) as group:
            keys = v.load(b, b.add(places, v.times(b, group, 8)), v.I64, 8)
            for pair in sums:
                for place in pair:
                    b.store(zero, place)
            with v.counted(b, b.udiv(elements, ir.Constant(v.I64, 2))) as i:
                for odd in range(2):
                    at = b.add(keys, v.times(b, i, 2 * KEYS * size))
                    key = _loaded(b, form, name, v.plus(b, at, odd * KEYS * size))
                    for row, pair in zip(rows, sums, strict=True):
                        at = v.plus(b, b.add(row, v.times(b, i, 8)), 4 * odd)
                        value = v.splat(b, v.load(b, at, v.F32, 4), v.V16F)
                        b.store(v.fma(b, value, key, b.load(pair[odd])), pair[odd])
            for target, (even, odd) in zip(outs, sums, strict=True):
                total = b.fadd(b.load(even), b.load(odd))
                v.store(b, total, b.add(target, v.times(b, group, 64)), 4)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def weighted_values(
    context: Any, isa: Any, kind: Any, queries: Any, vectors: Any, weights: Any, stride: Any,
    places: Any, keys: Any, row_bytes: Any, skipped: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Sums of values times weights, for a fixed number of queries and of 16-element vectors.

    `weights`: float32, a row of `stride` bytes for each query; `places`: addresses of each 16 keys'
    values; `keys`: how many; `row_bytes`: of one value; `skipped`: bytes in front of the wanted
    elements; `out`: float32, a row of `out_stride` bytes for each query.
    """
    literals = (isa, kind, queries, vectors)
    form, name = Isa(isa.literal_value), KV_KINDS[kind.literal_value]
    count, width = queries.literal_value, vectors.literal_value

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        weights, stride, places, keys, row_bytes, skipped, out, out_stride = arguments[4:]
        size = KV_BYTES[name]
        rows = [b.add(weights, b.mul(stride, ir.Constant(v.I64, n))) for n in range(count)]
        zero = v.constant(v.V16F, 0.0)
        sums = [[v.variable(b, zero) for _ in range(width)] for _ in range(count)]
        sixteen = ir.Constant(v.I64, KEYS)
        with v.counted(b, b.udiv(b.add(keys, ir.Constant(v.I64, KEYS - 1)), sixteen)) as group:
            place = v.load(b, b.add(places, v.times(b, group, 8)), v.I64, 8)
            first = b.add(place, skipped)
            before = v.times(b, group, KEYS)
            left = b.sub(keys, before)
            # What lies behind the last key is another's, and perhaps no number.
            within = b.select(b.icmp_unsigned("<", left, sixteen), left, sixteen)
            with v.counted(b, within) as i:
                at = b.add(first, b.mul(i, row_bytes))
                values = [
                    _loaded(b, form, name, v.plus(b, at, 16 * size * n)) for n in range(width)
                ]
                offset = v.times(b, b.add(before, i), 4)
                for row, places_of_row in zip(rows, sums, strict=True):
                    weight = v.splat(b, v.load(b, b.add(row, offset), v.F32, 4), v.V16F)
                    for value, total in zip(values, places_of_row, strict=True):
                        b.store(v.fma(b, weight, value, b.load(total)), total)
        for n, places_of_row in enumerate(sums):
            for m, total in enumerate(places_of_row):
                at = v.plus(b, b.add(out, b.mul(out_stride, ir.Constant(v.I64, n))), 64 * m)
                v.store(b, b.load(total), at, 4)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 8), generate
