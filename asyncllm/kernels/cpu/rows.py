"""Operations on rows of float32, 16 lanes at a time, as functions for kernels.

Lengths are numbers of 16 elements; addresses need no alignment beyond an element's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from asyncllm.kernels.cpu import vectors as v

_I, _F = types.int64, types.float32


def function(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make `generate(builder, *values)` a function of fixed argument types for kernels."""

    def decorate(generate: Callable[..., Any]) -> Any:
        names = ", ".join(f"a{index}" for index in range(len(arguments)))

        def typed(context: Any, *_: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                found = generate(builder, *values)
                return context.get_dummy_value() if found is None else found

            return result(*arguments), code

        # numba looks at the number of parameters.
        scope = {"typed": typed}
        exec(f"def {generate.__name__}(context, {names}): return typed(context)", scope)
        return intrinsic(scope[generate.__name__])

    return decorate


def _at(b: Any, address: Any, index: Any, size: int = 64) -> Any:
    return b.add(address, v.times(b, index, size))


@function(_F, _I, _I)
def sum_of_squares(b: Any, x: Any, count: Any) -> Any:
    sums = v.variable(b, v.constant(v.V16F, 0.0))
    with v.counted(b, count) as i:
        value = v.load(b, _at(b, x, i), v.V16F, 4)
        b.store(v.fma(b, value, value, b.load(sums)), sums)
    return v.total(b, b.load(sums))


@function(types.void, _I, _I, _F, _I, _I)
def scaled(b: Any, x: Any, weight: Any, scale: Any, out: Any, count: Any) -> None:
    """`out = x * scale * weight`."""
    scale = v.splat(b, scale, v.V16F)
    with v.counted(b, count) as i:
        value = b.fmul(v.load(b, _at(b, x, i), v.V16F, 4), scale)
        value = b.fmul(value, v.load(b, _at(b, weight, i), v.V16F, 4))
        v.store(b, value, _at(b, out, i), 4)


@function(types.void, _I, _F, _I)
def multiplied(b: Any, x: Any, scale: Any, count: Any) -> None:
    """`x *= scale`."""
    scale = v.splat(b, scale, v.V16F)
    with v.counted(b, count) as i:
        at = _at(b, x, i)
        v.store(b, b.fmul(v.load(b, at, v.V16F, 4), scale), at, 4)


@function(types.void, _I, _I, _I)
def added(b: Any, x: Any, y: Any, count: Any) -> None:
    """`x += y`."""
    with v.counted(b, count) as i:
        at = _at(b, x, i)
        v.store(b, b.fadd(v.load(b, at, v.V16F, 4), v.load(b, _at(b, y, i), v.V16F, 4)), at, 4)


@function(types.void, _I, _I, _I, _I, _I)
def quantised(b: Any, x: Any, row: Any, columns: Any, first: Any, count: Any) -> None:
    """Chunks `first` to `first + count - 1` of an int8 row from float32; see `products.py`.

    A chunk that holds NaN or infinity gets the scale NaN, which no product loses.
    """
    chunks = b.udiv(columns, ir.Constant(v.I64, 32))
    scales = b.add(row, columns)
    scaled_sums, sums = _at(b, scales, chunks, 4), _at(b, scales, chunks, 8)
    halves = _at(b, scales, chunks, 12)
    with v.counted(b, count) as i:
        number = b.add(first, i)
        source = _at(b, x, number, 128)
        values = [v.load(b, v.plus(b, source, 64 * part), v.V16F, 4) for part in range(2)]
        magnitude = v.maximum(b, *(v.absolute(b, value) for value in values))
        peak = v.largest(b, magnitude)
        zeros = [b.fmul(value, v.constant(v.V16F, 0.0)) for value in values]  # NaN of infinity too
        sick = v.total(b, b.fadd(*zeros))
        scale = b.fadd(b.fmul(peak, ir.Constant(v.F32, 1 / 127)), sick)
        empty = b.fcmp_ordered("==", peak, ir.Constant(v.F32, 0.0))
        inverse = b.fdiv(ir.Constant(v.F32, 127.0), peak)
        inverse = b.select(empty, ir.Constant(v.F32, 0.0), inverse)
        parts = []
        for part, value in enumerate(values):
            moved = v.rounded(b, b.fmul(value, v.splat(b, inverse, v.V16F)))
            # As a guard against what NaN would become: LLVM does not say.
            moved = v.minimum(
                b, v.maximum(b, moved, v.constant(v.V16F, -127)), v.constant(v.V16F, 127)
            )
            whole = b.fptosi(moved, v.V16I)
            v.store(b, b.trunc(whole, v.V16B), v.plus(b, _at(b, row, number, 32), 16 * part))
            parts.append(v.total(b, whole))
            v.store(b, parts[part], v.plus(b, _at(b, halves, number, 8), 4 * part), 4)
        whole = b.add(*parts)
        v.store(b, whole, _at(b, sums, number, 4), 4)
        v.store(b, scale, _at(b, scales, number, 4), 4)
        v.store(b, b.fmul(scale, b.sitofp(whole, v.F32)), _at(b, scaled_sums, number, 4), 4)


def _gate(activated: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def code(b: Any, gate: Any, up: Any, count: Any) -> None:
        with v.counted(b, count) as i:
            at = _at(b, gate, i)
            value = activated(b, v.load(b, at, v.V16F, 4))
            v.store(b, b.fmul(value, v.load(b, _at(b, up, i), v.V16F, 4)), at, 4)

    return code


def _silu(b: Any, x: Any) -> Any:
    return b.fdiv(x, b.fadd(v.constant(v.V16F, 1.0), v.exponential(b, b.fneg(x))))


def _gelu_tanh(b: Any, x: Any) -> Any:
    # x / 2 * (1 + tanh(u)) is x / (1 + e ** -2u).
    cubic = b.fmul(b.fmul(x, x), x)
    u = b.fadd(x, b.fmul(cubic, v.constant(v.V16F, 0.044715)))
    exponent = b.fmul(u, v.constant(v.V16F, -2 * math.sqrt(2 / math.pi)))
    return b.fdiv(x, b.fadd(v.constant(v.V16F, 1.0), v.exponential(b, exponent)))


silu_gated = function(types.void, _I, _I, _I)(_gate(_silu))
"""`gate = silu(gate) * up`."""
gelu_gated = function(types.void, _I, _I, _I)(_gate(_gelu_tanh))
"""`gate = gelu_tanh(gate) * up`."""


@function(types.void, _I, _F, _I)
def softcapped(b: Any, x: Any, cap: Any, count: Any) -> None:
    """`x = cap * tanh(x / cap)`."""
    cap = v.splat(b, cap, v.V16F)
    one, two = v.constant(v.V16F, 1.0), v.constant(v.V16F, 2.0)
    with v.counted(b, count) as i:
        at = _at(b, x, i)
        given = v.load(b, at, v.V16F, 4)
        grown = v.exponential(b, b.fmul(two, b.fdiv(given, cap)))
        value = b.fmul(cap, b.fsub(one, b.fdiv(two, b.fadd(grown, one))))
        # The exponential makes a number of NaN.
        value = b.select(b.fcmp_unordered("uno", given, given), given, value)
        v.store(b, value, at, 4)


@function(_F, _I, _I)
def softmax_numerators(b: Any, x: Any, count: Any) -> Any:
    """`x = e ** (x - max(x))` in place; returns the sum. Elements of -inf become exactly 0."""
    peak = v.variable(b, v.constant(v.V16F, -math.inf))
    with v.counted(b, count) as i:
        b.store(v.maximum(b, b.load(peak), v.load(b, _at(b, x, i), v.V16F, 4)), peak)
    highest = v.splat(b, v.largest(b, b.load(peak)), v.V16F)
    sums = v.variable(b, v.constant(v.V16F, 0.0))
    with v.counted(b, count) as i:
        at = _at(b, x, i)
        value = v.load(b, at, v.V16F, 4)
        hidden = b.fcmp_ordered("==", value, v.constant(v.V16F, -math.inf))
        raised = v.exponential(b, b.fsub(value, highest))
        # `maximum` and the polynomial both drop NaN; adding a zero that is NaN keeps it.
        raised = b.fadd(raised, b.fmul(b.fsub(value, highest), v.constant(v.V16F, 0.0)))
        raised = b.select(hidden, v.constant(v.V16F, 0.0), raised)
        v.store(b, raised, at, 4)
        b.store(b.fadd(b.load(sums), raised), sums)
    return v.total(b, b.load(sums))


@function(types.void, _I, _I)
def hidden(b: Any, x: Any, count: Any) -> None:
    """`count` single elements become -inf."""
    with v.counted(b, count) as i:
        v.store(b, ir.Constant(v.F32, -math.inf), _at(b, x, i, 4), 4)


@function(types.int64, _I, _I)
def index_of_largest(b: Any, x: Any, count: Any) -> Any:
    """The first index of the largest of `count` elements; -1 where one is NaN."""
    best = v.variable(b, v.constant(v.V16F, -math.inf))
    places = v.variable(b, v.constant(v.V16I, 0))
    sick = v.variable(b, v.constant(v.V16F, 0.0))
    sixteens = b.lshr(count, ir.Constant(v.I64, 4))
    first_lanes = ir.Constant(v.V16I, list(range(16)))

    def see(value: Any, index: Any) -> None:
        larger = b.fcmp_ordered(">", value, b.load(best))
        b.store(b.select(larger, value, b.load(best)), best)
        b.store(b.select(larger, index, b.load(places)), places)
        unordered = b.fcmp_unordered("uno", value, value)
        b.store(b.select(unordered, v.constant(v.V16F, 1.0), b.load(sick)), sick)

    with v.counted(b, sixteens) as i:
        base = v.splat(b, b.trunc(v.times(b, i, 16), v.I32), v.V16I)
        see(v.load(b, _at(b, x, i), v.V16F, 4), b.add(base, first_lanes))
    # The elements after the last sixteen, one at a time in all lanes.
    done = v.times(b, sixteens, 16)
    with v.counted(b, b.sub(count, done)) as i:
        index = b.add(done, i)
        value = v.splat(b, v.load(b, _at(b, x, index, 4), v.F32, 4), v.V16F)
        see(value, v.splat(b, b.trunc(index, v.I32), v.V16I))
    peak = v.splat(b, v.largest(b, b.load(best)), v.V16F)
    is_peak = b.fcmp_ordered("==", b.load(best), peak)
    index = b.select(is_peak, b.load(places), v.constant(v.V16I, 0x7FFFFFFF))
    first = v.folded(b, index, lambda p, q: b.select(b.icmp_signed("<", p, q), p, q))
    no_number = b.fcmp_ordered(">", v.total(b, b.load(sick)), ir.Constant(v.F32, 0.0))
    return b.select(no_number, ir.Constant(v.I64, -1), b.zext(first, v.I64))
