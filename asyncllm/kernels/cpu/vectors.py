"""Vectors of 16 lanes as LLVM IR: the alphabet that the kernels' intrinsics are written in.

Whatever the machine, the same operations happen in the same order, so that every form of a kernel
gives the same bits: sums of integers are exact, sums of floats are spelled out lane by lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from asyncllm.kernels.cpu.isa import Isa

Builder = Any
Value = Any

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
V16I = ir.VectorType(I32, LANES)
V16S = ir.VectorType(I16, LANES)
V16B = ir.VectorType(I8, LANES)
V16F = ir.VectorType(F32, LANES)
V16H = ir.VectorType(F16, LANES)
V64B = ir.VectorType(I8, 4 * LANES)

# What the VNNI instructions' operands are in LLVM: bytes, or before version 22 words of four.
_OPERANDS_ARE_BYTES = binding.llvm_version_info >= (22,)

_V8I = ir.VectorType(I32, 8)
_V16S = ir.VectorType(I16, 16)
_V32B = ir.VectorType(I8, 32)


def constant(kind: Any, value: float) -> Value:
    """The same number in every lane, or a scalar."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def declared(builder: Builder, name: str, result: Any, *arguments: Any) -> Value:
    """A function of LLVM or of the process, declared once a module."""
    module = builder.module
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, list(arguments)), name)


def pointer(builder: Builder, address: Value, kind: Any) -> Value:
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Builder, address: Value, kind: Any, align: int = 1) -> Value:
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def store(builder: Builder, value: Value, address: Value, align: int = 1) -> None:
    builder.store(value, pointer(builder, address, value.type)).align = align


def plus(builder: Builder, address: Value, offset: int) -> Value:
    return builder.add(address, ir.Constant(I64, offset)) if offset else address


def times(builder: Builder, value: Value, factor: int) -> Value:
    return builder.mul(value, ir.Constant(I64, factor))


def splat(builder: Builder, value: Value, kind: Any) -> Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    order = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), order)


def lanes(builder: Builder, vector: Value, order: Sequence[int], other: Value = None) -> Value:
    indices = ir.Constant(ir.VectorType(I32, len(order)), list(order))
    return builder.shuffle_vector(vector, vector if other is None else other, indices)


def fma(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """`x * y + z`, rounded once."""
    return builder.call(declared(builder, "llvm.fma.v16f32", V16F, V16F, V16F, V16F), [x, y, z])


def maximum(builder: Builder, x: Value, y: Value) -> Value:
    return builder.call(declared(builder, "llvm.maxnum.v16f32", V16F, V16F, V16F), [x, y])


def minimum(builder: Builder, x: Value, y: Value) -> Value:
    return builder.call(declared(builder, "llvm.minnum.v16f32", V16F, V16F, V16F), [x, y])


def rounded(builder: Builder, x: Value) -> Value:
    return builder.call(declared(builder, "llvm.rint.v16f32", V16F, V16F), [x])


def absolute(builder: Builder, x: Value) -> Value:
    return builder.call(declared(builder, "llvm.fabs.v16f32", V16F, V16F), [x])


def folded(builder: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes combined, halves with halves, so that the order is the same everywhere."""
    count = x.type.count
    while count > 1:
        count //= 2
        low, high = lanes(builder, x, range(count)), lanes(builder, x, range(count, 2 * count))
        x = combine(low, high)
    return builder.extract_element(x, ir.Constant(I32, 0))


def total(builder: Builder, x: Value) -> Value:
    """The sum of all lanes, floats or integers."""
    return folded(builder, x, builder.fadd if x.type.element == F32 else builder.add)


def largest(builder: Builder, x: Value) -> Value:
    """The largest lane; there must be no NaN."""
    return folded(builder, x, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def exponential(builder: Builder, x: Value) -> Value:
    """The exponential, with a relative error of 1e-7, of x between -87 and 88 (after Cephes)."""
    x = minimum(builder, maximum(builder, x, constant(V16F, -87.0)), constant(V16F, 88.0))
    n = rounded(builder, builder.fmul(x, constant(V16F, 1 / math.log(2))))
    # ln 2 in two parts, the first of which has zeros at its end.
    r = fma(builder, n, constant(V16F, -0.693359375), x)
    r = fma(builder, n, constant(V16F, 2.12194440e-4), r)
    p = constant(V16F, 1.9875691500e-4)
    for coefficient in (
        *(1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2),
        *(1.6666665459e-1, 5.0000001201e-1),
    ):
        p = fma(builder, p, r, constant(V16F, coefficient))
    p = fma(builder, builder.fmul(r, r), p, builder.fadd(r, constant(V16F, 1.0)))
    power = builder.shl(builder.fptosi(n, V16I), constant(V16I, 23))
    return builder.bitcast(builder.add(builder.bitcast(p, V16I), power), V16F)


def widened(builder: Builder, isa: Isa, half: Value) -> Value:
    """float16 to float32. Without the instruction for it: shifted into place and rescaled."""
    if isa is not Isa.PORTABLE:
        return builder.fpext(half, V16F)
    bits = builder.zext(builder.bitcast(half, V16S), V16I)
    magnitude = builder.shl(builder.and_(bits, constant(V16I, 0x7FFF)), constant(V16I, 13))
    value = builder.fmul(builder.bitcast(magnitude, V16F), constant(V16F, 2.0**112))
    # Infinity and NaN have the largest exponent there, and must have it here.
    special = builder.icmp_unsigned(">=", magnitude, constant(V16I, 0x7C00 << 13))
    huge = builder.or_(magnitude, constant(V16I, 0x7F800000))
    value = builder.select(special, huge, builder.bitcast(value, V16I))
    sign = builder.shl(builder.and_(bits, constant(V16I, 0x8000)), constant(V16I, 16))
    return builder.bitcast(builder.or_(value, sign), V16F)


def narrowed(builder: Builder, isa: Isa, value: Value) -> Value:
    """float32 to float16, to the nearest, ties to even."""
    if isa is not Isa.PORTABLE:
        return builder.fptrunc(value, V16H)
    bits = builder.bitcast(value, V16I)
    magnitude = builder.and_(bits, constant(V16I, 0x7FFFFFFF))
    sign = builder.lshr(builder.and_(bits, constant(V16I, -0x80000000)), constant(V16I, 16))
    # Normal numbers: rebias the exponent and round the 13 bits away.
    odd = builder.and_(builder.lshr(magnitude, constant(V16I, 13)), constant(V16I, 1))
    rebiased = builder.add(magnitude, constant(V16I, (-112 << 23) + 0xFFF))
    normal = builder.lshr(builder.add(rebiased, odd), constant(V16I, 13))
    # Subnormal ones: adding one half leaves exactly their bits at the end of the mantissa.
    lifted = builder.fadd(builder.bitcast(magnitude, V16F), constant(V16F, 0.5))
    small = builder.sub(builder.bitcast(lifted, V16I), constant(V16I, 0x3F000000))
    half = builder.select(
        builder.icmp_unsigned("<", magnitude, constant(V16I, 113 << 23)), small, normal
    )
    infinite = builder.icmp_unsigned(">=", magnitude, constant(V16I, 0x477FF000))
    half = builder.select(infinite, constant(V16I, 0x7C00), half)
    nan = builder.icmp_unsigned(">", magnitude, constant(V16I, 0x7F800000))
    half = builder.select(nan, constant(V16I, 0x7E00), half)
    return builder.bitcast(builder.trunc(builder.or_(half, sign), V16S), V16H)


def bfloat_widened(builder: Builder, value: Value) -> Value:
    """bfloat16, as 16-bit integers, to float32."""
    return builder.bitcast(builder.shl(builder.zext(value, V16I), constant(V16I, 16)), V16F)


def bfloat_narrowed(builder: Builder, value: Value) -> Value:
    """float32 to bfloat16, as 16-bit integers, to the nearest, ties to even."""
    bits = builder.bitcast(value, V16I)
    odd = builder.and_(builder.lshr(bits, constant(V16I, 16)), constant(V16I, 1))
    moved = builder.add(builder.add(bits, constant(V16I, 0x7FFF)), odd)
    nan = builder.fcmp_unordered("uno", value, value)
    bits = builder.select(nan, constant(V16I, 0x7FC00000), moved)
    return builder.trunc(builder.lshr(bits, constant(V16I, 16)), V16S)


def dot_bytes(builder: Builder, isa: Isa, sums: Value, u: Value, s: Value, wide: bool) -> Value:
    """Add to each of 16 sums four products of an unsigned and a signed byte.

    Args:
        builder: where the instructions go.
        isa: which instructions.
        sums: 16 x i32.
        u: 64 unsigned bytes.
        s: 64 signed bytes.
        wide: `u` has values above 127, taken as `u - 128` where `biased` says so.
    """
    if isa is Isa.AVX512_VNNI:
        return _vnni(builder, "llvm.x86.avx512.vpdpbusd.512", sums, u, s)
    if isa is Isa.PORTABLE:
        return _dot_portable(builder, sums, u, s)
    halves = []
    for part in (0, 1):
        a = lanes(builder, u, range(32 * part, 32 * part + 32))
        c = lanes(builder, s, range(32 * part, 32 * part + 32))
        if isa is Isa.AVX2_VNNI:
            into = lanes(builder, sums, range(8 * part, 8 * part + 8))
            halves.append(_vnni(builder, "llvm.x86.avx512.vpdpbusd.256", into, a, c))
            continue
        if wide:
            # Pairs of products would pass 16 bits: multiply |w| with x given the sign of w.
            signed = declared(builder, "llvm.x86.avx2.psign.b", _V32B, _V32B, _V32B)
            w = builder.xor(a, constant(_V32B, -128))
            a, c = builder.call(signed, [w, w]), builder.call(signed, [c, w])
        pairs = declared(builder, "llvm.x86.avx2.pmadd.ub.sw", _V16S, _V32B, _V32B)
        fours = declared(builder, "llvm.x86.avx2.pmadd.wd", _V8I, _V16S, _V16S)
        products = builder.call(pairs, [a, c])
        halves.append(builder.call(fours, [products, constant(_V16S, 1)]))
    joined = lanes(builder, halves[0], range(16), halves[1])
    return joined if isa is Isa.AVX2_VNNI else builder.add(sums, joined)


def _vnni(builder: Builder, name: str, sums: Value, u: Value, s: Value) -> Value:
    kind = u.type if _OPERANDS_ARE_BYTES else sums.type
    operands = [builder.bitcast(each, kind) for each in (u, s)]
    function = declared(builder, name, sums.type, sums.type, kind, kind)
    return builder.call(function, [sums, *operands])


def biased(isa: Isa, wide: bool) -> bool:
    """Whether `dot_bytes` takes wide bytes as they are, 128 too large."""
    return not (wide and isa is Isa.AVX2)


def _dot_portable(builder: Builder, sums: Value, u: Value, s: Value) -> Value:
    u, s = builder.bitcast(u, V16I), builder.bitcast(s, V16I)
    for byte in range(4):
        a = builder.and_(builder.lshr(u, constant(V16I, 8 * byte)), constant(V16I, 255))
        c = builder.shl(s, constant(V16I, 24 - 8 * byte))
        sums = builder.add(sums, builder.mul(a, builder.ashr(c, constant(V16I, 24))))
    return sums


def looked_up(builder: Builder, isa: Isa, table: Sequence[int], codes: Value) -> Value:
    """`table[code]` for 64 bytes that are below 16; the table's entries are bytes."""
    if isa is Isa.PORTABLE:
        found = constant(V64B, table[0])
        for code, entry in enumerate(table[1:], 1):
            same = builder.icmp_unsigned("==", codes, constant(V64B, code))
            found = builder.select(same, constant(V64B, entry), found)
        return found
    if isa is Isa.AVX512_VNNI:
        shuffle = declared(builder, "llvm.x86.avx512.pshuf.b.512", V64B, V64B, V64B)
        return builder.call(shuffle, [ir.Constant(V64B, [*table] * 4), codes])
    shuffle = declared(builder, "llvm.x86.avx2.pshuf.b", _V32B, _V32B, _V32B)
    entries = ir.Constant(_V32B, [*table] * 2)
    low, high = (
        builder.call(shuffle, [entries, lanes(builder, codes, range(at, at + 32))])
        for at in (0, 32)
    )
    return lanes(builder, low, range(64), high)


def variable(builder: Builder, value: Value) -> Value:
    """A place that a loop changes; LLVM keeps it in a register."""
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    return place


@contextmanager
def counted(builder: Builder, count: Value) -> Iterator[Value]:
    """A loop over 0 .. count - 1."""
    with cgutils.for_range(builder, count, intp=I64) as loop:
        yield loop.index
