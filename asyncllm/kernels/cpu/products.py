"""Products of activations with tiles of weights, and tiles back to float32.

Activations are int8 with one float32 scale for each 32 columns (`quantise` in `rows.py`), so the
sums within 32 columns (16 where a format has scales for 16) are integers and exact; scaled, they
are added up in float32 column by column. A row's arithmetic is the same whatever rows run beside
it. Weights in floating point meet activations in float32.

An int8 row of K columns lies in memory as: int8 [K], scales float32 [K / 32], scale times sum
float32 [K / 32], sums int32 [K / 32], sums of halves int32 [K / 16].
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from asyncllm.kernels.cpu import vectors as v
from asyncllm.kernels.cpu.isa import Isa
from asyncllm.kernels.cpu.tiles import CHUNK, FLOATS, LAYOUTS, TILE_ROWS, TileLayout

TILE_FORMS = (*LAYOUTS, *FLOATS)

# How far ahead weights are asked for. What a processor fetches by itself stops at the end of a page
# and begins slowly; a step reads every weight once, in order.
AHEAD_BYTES = 8192


def quantised_bytes(columns: int) -> int:
    """Bytes of an int8 row and what belongs to it, a multiple of 64."""
    return -(-(columns + columns // CHUNK * 20) // 64) * 64


class _Chunk:
    """Code that reads one chunk of a tile: its codes vector by vector, its scales, its minimums."""

    def __init__(self, builder: Any, isa: Isa, layout: TileLayout, address: Any, head: Any) -> None:
        self._b, self._isa, self._layout = builder, isa, layout
        self._address, self._head = address, head

    def _vector(self, number: int) -> Any:
        return v.load(self._b, v.plus(self._b, self._address, 64 * number), v.V64B)

    def _field(self, vector: Any, place: int, target: int, mask: int) -> Any:
        """Bits at `place` of every byte moved to `target`; the mask says which to keep there."""
        words = self._b.bitcast(vector, v.V16I)
        move = place - target
        if move > 0:
            words = self._b.lshr(words, v.constant(v.V16I, move))
        elif move < 0:
            words = self._b.shl(words, v.constant(v.V16I, -move))
        return self._b.and_(self._b.bitcast(words, v.V64B), v.constant(v.V64B, mask))

    def codes(self, j: int) -> Any:
        """64 unsigned bytes: columns 4j to 4j + 3 of the 16 rows, `offset` or 128 too large."""
        bits, base = self._layout.bits, 0
        if bits == 8:
            return self._vector(j)
        if bits >= 4:
            found = self._field(self._vector(j % 4), 4 * (j // 4), 0, 15)
            base = 4
        else:
            found = self._field(self._vector(j // 4), 2 * (j % 4), 0, 3)
            base = 2
        if bits - base == 2:
            more = self._field(self._vector(base + j // 4), 2 * (j % 4), base, 3 << base)
            found = self._b.or_(found, more)
        elif bits - base == 1:
            more = self._field(self._vector(base), j, base, 1 << base)
            found = self._b.or_(found, more)
        if self._layout.table is not None:
            table = [value + 128 for value in self._layout.table]
            found = v.looked_up(self._b, self._isa, table, found)
        return found

    @property
    def offset(self) -> int:
        """What the bytes of `codes` are too large by."""
        return 128 if self._layout.table is not None else self._layout.offset

    def _numbers(self, index: int) -> Any:
        """Scale or minimum number `index` of the chunk, as float32."""
        layout, b = self._layout, self._b
        address = v.plus(b, self._address, layout.codes_bytes + index * layout.scale_bytes)
        if layout.scale == "float16":
            return v.widened(b, self._isa, v.load(b, address, v.V16H))
        if layout.scale == "float32":
            return v.load(b, address, v.V16F)
        small = v.load(b, address, v.V16B)
        if layout.scale == "super":
            return b.sitofp(b.sext(small, v.V16I), v.V16F)
        # 2 ** (exponent - 128), which is subnormal for 0 and 1.
        exponent = b.zext(small, v.V16I)
        normal = b.shl(b.sub(exponent, v.constant(v.V16I, 1)), v.constant(v.V16I, 23))
        tiny = b.shl(v.constant(v.V16I, 0x00200000), exponent)
        is_tiny = b.icmp_unsigned("<", exponent, v.constant(v.V16I, 2))
        return b.bitcast(b.select(is_tiny, tiny, normal), v.V16F)

    def scales(self) -> list[Any]:
        """One float32 scale a row for each group of the chunk."""
        found = [self._numbers(index) for index in range(CHUNK // self._layout.group)]
        if self._layout.scale == "super":
            head = v.widened(self._b, self._isa, v.load(self._b, self._head, v.V16H))
            found = [self._b.fmul(head, scale) for scale in found]
        return found

    def minimums(self) -> list[Any]:
        """What is added to each group's weights, or nothing."""
        if not self._layout.minimum:
            return []
        groups = CHUNK // self._layout.group
        found = [self._numbers(groups + index) for index in range(groups)]
        if self._layout.scale == "super":
            place = v.plus(self._b, self._head, 32)
            head = v.widened(self._b, self._isa, v.load(self._b, place, v.V16H))
            found = [self._b.fneg(self._b.fmul(head, each)) for each in found]
        return found


def _over_chunks(builder: Any, layout: TileLayout, tile: Any, chunks: Any, body: Any) -> None:
    """`body(chunk number, address of its codes, address of its block)` for all chunks."""
    if layout.scale != "super":
        with v.counted(builder, chunks) as number:
            address = builder.add(tile, v.times(builder, number, layout.chunk_bytes))
            body(number, address, None)
        return
    each = layout.block // CHUNK
    with v.counted(builder, builder.udiv(chunks, ir.Constant(v.I64, each))) as block:
        head = builder.add(tile, v.times(builder, block, layout.block_bytes))
        first = v.plus(builder, head, layout.head_bytes)
        with v.counted(builder, ir.Constant(v.I64, each)) as within:
            number = builder.add(v.times(builder, block, each), within)
            body(number, builder.add(first, v.times(builder, within, layout.chunk_bytes)), head)


@intrinsic(prefer_literal=True)
def tile_times_rows(
    context: Any, isa: Any, form: Any, rows: Any, tile: Any, x: Any, stride: Any, columns: Any,
    out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """`out[r, :16] = tile @ x[r]` for a fixed number of rows."""
    isa_type, isa, count = isa, Isa(isa.literal_value), rows.literal_value
    name = TILE_FORMS[form.literal_value]

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        tile, x, stride, columns, out, out_stride = arguments[3:]
        xs = [b.add(x, v.times(b, stride, row)) for row in range(count)]
        if name in FLOATS:
            sums = _float_sums(b, isa, name, tile, xs, columns)
        else:
            sums = _integer_sums(b, isa, LAYOUTS[name], tile, xs, columns)
        for row, total in enumerate(sums):
            v.store(b, total, b.add(out, v.times(b, out_stride, row)), 4)
        return context.get_dummy_value()

    return types.void(isa_type, form, rows, *[types.int64] * 6), generate


def _fetch_ahead(b: Any, address: Any, count: int) -> None:
    """Ask for bytes that are read `AHEAD_BYTES` later; beyond the end nothing comes of it."""
    arguments = (v.I8.as_pointer(), v.I32, v.I32, v.I32)
    fetch = v.declared(b, "llvm.prefetch.p0", ir.VoidType(), *arguments)
    read, near, data = (ir.Constant(v.I32, value) for value in (0, 3, 1))
    for line in range(0, count, 64):
        place = v.pointer(b, v.plus(b, address, AHEAD_BYTES + line), v.I8)
        b.call(fetch, [place, read, near, data])


def _integer_sums(b: Any, isa: Isa, layout: TileLayout, tile: Any, xs: Any, columns: Any) -> Any:
    """Code for the products of int8 rows with a tile; gives one vector a row."""
    sums = [v.variable(b, v.constant(v.V16F, 0.0)) for _ in xs]
    chunks = b.udiv(columns, ir.Constant(v.I64, CHUNK))
    fours, eights = v.times(b, chunks, 4), v.times(b, chunks, 8)
    groups = CHUNK // layout.group

    def body(number: Any, address: Any, head: Any) -> None:
        _fetch_ahead(b, address, layout.chunk_bytes)
        chunk = _Chunk(b, isa, layout, address, head)
        offset = chunk.offset if v.biased(isa, layout.wide) else 0
        column, word = v.times(b, number, CHUNK), v.times(b, number, 4)
        quants = [b.add(x, column) for x in xs]
        scales_at = [b.add(b.add(x, columns), word) for x in xs]
        sums_at = [b.add(at, eights) for at in scales_at]
        halves_at = [b.add(b.add(at, fours), word) for at in sums_at]
        places = sums_at if groups == 1 else halves_at
        products: list[list[Any]] = []
        for group in range(groups):
            # Codes are `offset` too large, products by that many times the activations' sum.
            starts = [
                v.splat(
                    b,
                    b.mul(
                        v.load(b, v.plus(b, at, 4 * group), v.I32, 4), ir.Constant(v.I32, -offset)
                    ),
                    v.V16I,
                )
                if offset
                else v.constant(v.V16I, 0)
                for at in places
            ]
            products.append(starts)
        for j in range(CHUNK // 4):
            codes = chunk.codes(j)
            of_group = products[j * 4 // layout.group]
            for row, at in enumerate(quants):
                word_of_x = v.load(b, v.plus(b, at, 4 * j), v.I32)
                x = b.bitcast(v.splat(b, word_of_x, v.V16I), v.V64B)
                of_group[row] = v.dot_bytes(b, isa, of_group[row], codes, x, layout.wide)
        scales, minimums = chunk.scales(), chunk.minimums()
        for row, place in enumerate(sums):
            total = b.load(place)
            x_scale = v.splat(b, v.load(b, scales_at[row], v.F32, 4), v.V16F)
            for of_group, scale in zip(products, scales, strict=True):
                scaled = b.fmul(scale, x_scale)
                total = v.fma(b, b.sitofp(of_group[row], v.V16F), scaled, total)
            for group, least in enumerate(minimums):
                if groups == 1:
                    x_sum = v.splat(b, v.load(b, b.add(scales_at[row], fours), v.F32, 4), v.V16F)
                else:
                    whole = v.load(b, v.plus(b, halves_at[row], 4 * group), v.I32, 4)
                    x_sum = b.fmul(v.splat(b, b.sitofp(whole, v.F32), v.V16F), x_scale)
                total = v.fma(b, least, x_sum, total)
            b.store(total, place)

    _over_chunks(b, layout, tile, chunks, body)
    return [b.load(place) for place in sums]


def _float_column(b: Any, isa: Isa, name: str, address: Any) -> Any:
    if name == "F32":
        return v.load(b, address, v.V16F)
    if name == "F16":
        return v.widened(b, isa, v.load(b, address, v.V16H))
    return v.bfloat_widened(b, v.load(b, address, v.V16S))


def _float_sums(b: Any, isa: Isa, name: str, tile: Any, xs: Any, columns: Any) -> Any:
    """Code for the products of float32 rows with a tile, even and odd columns apart."""
    sums = [[v.variable(b, v.constant(v.V16F, 0.0)) for _ in range(2)] for _ in xs]
    size = FLOATS[name] * TILE_ROWS
    with v.counted(b, b.udiv(columns, ir.Constant(v.I64, 2))) as pair:
        address = b.add(tile, v.times(b, pair, 2 * size))
        _fetch_ahead(b, address, 2 * size)
        for odd in range(2):
            weights = _float_column(b, isa, name, v.plus(b, address, odd * size))
            for row, x in enumerate(xs):
                at = v.plus(b, b.add(x, v.times(b, pair, 8)), 4 * odd)
                value = v.splat(b, v.load(b, at, v.F32, 4), v.V16F)
                b.store(v.fma(b, weights, value, b.load(sums[row][odd])), sums[row][odd])
    return [b.fadd(b.load(even), b.load(odd)) for even, odd in sums]


@intrinsic(prefer_literal=True)
def unpack_lane(
    context: Any, isa: Any, form: Any, tile: Any, columns: Any, lane: Any, scale: Any, out: Any
) -> Any:
    """`out[:columns] = scale * tile[lane]`, with the checkpoint's own roundings."""
    isa_type, isa, name = isa, Isa(isa.literal_value), TILE_FORMS[form.literal_value]

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        tile, columns, lane, scale, out = arguments[2:]
        lane = b.trunc(lane, v.I32)

        def put(column: Any, values: Any) -> None:
            value = b.fmul(b.extract_element(values, lane), scale)
            v.store(b, value, b.add(out, v.times(b, column, 4)), 4)

        if name in FLOATS:
            with v.counted(b, columns) as column:
                address = b.add(tile, v.times(b, column, FLOATS[name] * TILE_ROWS))
                put(column, _float_column(b, isa, name, address))
            return context.get_dummy_value()
        layout = LAYOUTS[name]

        def body(number: Any, address: Any, head: Any) -> None:
            chunk = _Chunk(b, isa, layout, address, head)
            scales, minimums = chunk.scales(), chunk.minimums()
            for column in range(CHUNK):
                group = column // layout.group
                words = b.lshr(
                    b.bitcast(chunk.codes(column // 4), v.V16I),
                    v.constant(v.V16I, 8 * (column % 4)),
                )
                code = b.and_(words, v.constant(v.V16I, 255))
                value = b.sitofp(b.sub(code, v.constant(v.V16I, chunk.offset)), v.V16F)
                value = b.fmul(value, scales[group])
                if minimums:
                    value = b.fadd(value, minimums[group])
                put(v.plus(b, v.times(b, number, CHUNK), column), value)

        _over_chunks(b, layout, tile, b.udiv(columns, ir.Constant(v.I64, CHUNK)), body)
        return context.get_dummy_value()

    arguments = [types.int64] * 3 + [types.float32, types.int64]
    return types.void(isa_type, form, *arguments), generate
