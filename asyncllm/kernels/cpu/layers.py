"""The kernels of a step. Each works on one unit of one phase, see `team.py` and `step.py`.

Kernels are made for an instruction set, and where it matters for a format or a type of K and V.
They call nothing of Python and raise nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numba

from asyncllm.kernels.cpu import step as s
from asyncllm.kernels.cpu.attention import (
    KV_BYTES,
    KV_KINDS,
    put_key,
    put_value,
    scores,
    weighted_values,
)
from asyncllm.kernels.cpu.isa import Isa
from asyncllm.kernels.cpu.memory import (
    call_kernel,
    load_f32,
    load_f64,
    load_i64,
    store_f32,
    store_i64,
)
from asyncllm.kernels.cpu.products import TILE_FORMS, tile_times_rows, unpack_lane
from asyncllm.kernels.cpu.rows import (
    added,
    gelu_gated,
    hidden,
    multiplied,
    quantised,
    scaled,
    silu_gated,
    softcapped,
    softmax_numerators,
    sum_of_squares,
)

Kernel = Callable[[int, int, int, int], None]

_inlined = numba.njit(nogil=True, error_model="numpy", inline="never")

# Records' offsets are plain numbers in the compiled code.
P, G, N, H, A = s.PRODUCT, s.GATED, s.NORM, s.HEADS, s.ATTENTION
E = s.EMBEDDING
WORD, ROWS, ROW_BLOCK, RULES = s.WORD, s.ROWS, s.ROW_BLOCK, s.RULES


@numba.njit(nogil=True)
def _per_unit(step: int, rule: int) -> int:
    return load_i64(step + WORD * (RULES + 2 * rule + 1))


@numba.njit(nogil=True)
def _root_mean_square(x: int, columns: int, eps: float) -> float:
    """What an RMSNorm multiplies by, before its weight."""
    mean = sum_of_squares(x, columns // 16) / numba.float32(columns)
    return numba.float32(1.0) / numba.float32(math.sqrt(mean + eps))


def product(isa: Isa, form: str) -> Kernel:
    """Some tiles of a weight times some rows."""
    level, number = int(isa), TILE_FORMS.index(form)

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        tiles, tile_bytes = load_i64(p + P.tiles), load_i64(p + P.tile_bytes)
        count, columns = load_i64(p + P.count), load_i64(p + P.columns)
        x_stride, out_stride = load_i64(p + P.x_stride), load_i64(p + P.out_stride)
        bias = load_i64(p + P.bias)
        each = _per_unit(step, load_i64(p + P.rule))
        parts = (count + each - 1) // each
        block = load_i64(step + WORD * ROW_BLOCK)
        low = unit // parts * block
        high = min(load_i64(step + WORD * load_i64(p + P.rows)), low + block)
        first = unit % parts * each
        for tile in range(first, min(count, first + each)):
            weights = tiles + tile * tile_bytes
            x = load_i64(p + P.x) + low * x_stride
            out = load_i64(p + P.out) + low * out_stride + 64 * tile
            row = low
            while row < high:
                left = high - row
                taken = 1
                if left >= 8:
                    taken = 8
                    tile_times_rows(
                        level, number, 8, weights, x, x_stride, columns, out, out_stride
                    )
                elif left >= 4:
                    taken = 4
                    tile_times_rows(
                        level, number, 4, weights, x, x_stride, columns, out, out_stride
                    )
                elif left >= 2:
                    taken = 2
                    tile_times_rows(
                        level, number, 2, weights, x, x_stride, columns, out, out_stride
                    )
                else:
                    tile_times_rows(
                        level, number, 1, weights, x, x_stride, columns, out, out_stride
                    )
                if bias != 0:
                    for extra in range(taken):
                        added(out + extra * out_stride, bias + 64 * tile, 1)
                row += taken
                x += taken * x_stride
                out += taken * out_stride

    return kernel


def gated(activation: str) -> Kernel:
    """Gate and up tiles, the activation, and the int8 form of the result."""
    gelu = activation == "gelu_tanh"

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        call_kernel(load_i64(p + G.gate_kernel), load_i64(p + G.gate), step, unit, thread)
        call_kernel(load_i64(p + G.up_kernel), load_i64(p + G.up), step, unit, thread)
        count, columns = load_i64(p + G.count), load_i64(p + G.columns)
        stride, quants = load_i64(p + G.stride), load_i64(p + G.quantised)
        each = _per_unit(step, load_i64(p + G.rule))
        parts = (count + each - 1) // each
        block = load_i64(step + WORD * ROW_BLOCK)
        low = unit // parts * block
        high = min(load_i64(step + WORD * ROWS), low + block)
        first = unit % parts * each
        tiles = min(count, first + each) - first
        for row in range(low, high):
            gate = load_i64(p + G.out) + row * stride
            up = load_i64(p + G.up_out) + row * stride
            if gelu:
                gelu_gated(gate + 64 * first, up + 64 * first, tiles)
            else:
                silu_gated(gate + 64 * first, up + 64 * first, tiles)
            if quants != 0:
                target = quants + row * load_i64(p + G.quantised_stride)
                quantised(gate, target, columns, first // 2, tiles // 2)

    return kernel


def norm() -> Kernel:
    """Add a block's result to the residual stream, then norm it for the next block."""

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        columns, each = load_i64(p + N.columns), _per_unit(step, load_i64(p + N.rule))
        eps = load_f32(p + N.eps)
        sixteens = columns // 16
        rows = load_i64(step + WORD * load_i64(p + N.rows))
        chosen, weight = load_i64(p + N.chosen), load_i64(p + N.weight)
        for row in range(unit * each, min(rows, unit * each + each)):
            source = row if chosen == 0 else load_i64(chosen + 8 * row)
            x = load_i64(p + N.x) + source * load_i64(p + N.x_stride)
            y = load_i64(p + N.added)
            if y != 0:
                y += source * load_i64(p + N.added_stride)
                post = load_i64(p + N.post_weight)
                if post != 0:
                    scaled(y, post, _root_mean_square(y, columns, eps), y, sixteens)
                added(x, y, sixteens)
            if weight != 0:
                out = load_i64(p + N.out) + row * load_i64(p + N.out_stride)
                scaled(x, weight, _root_mean_square(x, columns, eps), out, sixteens)
                target = load_i64(p + N.quantised)
                if target != 0:
                    target += row * load_i64(p + N.quantised_stride)
                    quantised(out, target, columns, 0, columns // 32)

    return kernel


@numba.njit(nogil=True)
def _rotate(x: int, cos: int, sin: int, half: int, apart: int, step: int) -> None:
    """Turn pairs of elements: `apart` from first to second, `step` from pair to pair, in bytes."""
    for i in range(half):
        at = x + i * step
        a, b = load_f32(at), load_f32(at + apart)
        c, d = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        store_f32(at, a * c - b * d)
        store_f32(at + apart, b * c + a * d)


@numba.njit(nogil=True)
def _block_at(table: int, number: int) -> int:
    """The block that has a sequence's block number: its table begins with the ring's size or 0."""
    ring = load_i64(table)
    if ring != 0:
        number = number % ring
    return load_i64(table + 8 + 8 * number)


def heads(isa: Isa, kv_kind: str, interleaved: bool) -> Kernel:
    """Norm and turn the heads of q and k; write k and v into the pool."""
    level, kind, size = int(isa), KV_KINDS.index(kv_kind), KV_BYTES[kv_kind]

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        head_dim, half = load_i64(p + H.head_dim), load_i64(p + H.rotary_half)
        query_heads, kv_heads = load_i64(p + H.heads), load_i64(p + H.kv_heads)
        block_tokens = load_i64(p + H.block_tokens)
        eps, each = load_f32(p + H.eps), _per_unit(step, load_i64(p + H.rule))
        every = query_heads + 2 * kv_heads
        sixteens = head_dim // 16
        last = load_i64(step + WORD * ROWS) * every
        for index in range(unit * each, min(last, unit * each + each)):
            row, head = index // every, index % every
            x = load_i64(p + H.qkv) + row * load_i64(p + H.stride) + 4 * head_dim * head
            if head < query_heads + kv_heads:
                weight = load_i64(p + H.q_norm) if head < query_heads else load_i64(p + H.k_norm)
                if weight != 0:
                    scaled(x, weight, _root_mean_square(x, head_dim, eps), x, sixteens)
                cos = load_i64(p + H.angles) + row * load_i64(p + H.angles_stride)
                if interleaved:
                    _rotate(x, cos, cos + 4 * half, half, 4, 8)
                else:
                    _rotate(x, cos, cos + 4 * half, half, 4 * half, 4)
            if head < query_heads:
                multiplied(x, load_f32(p + H.query_scale), sixteens)
                continue
            position = load_i64(load_i64(p + H.positions) + 8 * row)
            slot = load_i64(load_i64(p + H.slots) + 8 * row)
            table = load_i64(p + H.tables) + slot * load_i64(p + H.table_stride)
            within = position % block_tokens
            block = _block_at(table, position // block_tokens)
            kv_head = (head - query_heads) % kv_heads
            place = (block * kv_heads + kv_head) * block_tokens * head_dim * size
            if head < query_heads + kv_heads:
                place += within // 16 * (16 * head_dim * size) + within % 16 * size
                put_key(level, kind, x, load_i64(p + H.keys) + place, head_dim)
            else:
                place += within * head_dim * size
                put_value(level, kind, x, load_i64(p + H.values) + place, head_dim)

    return kernel


def attention(isa: Isa, kv_kind: str) -> Kernel:
    """Some heads of some consecutive rows of one sequence, over the keys they see."""
    level, kind, size = int(isa), KV_KINDS.index(kv_kind), KV_BYTES[kv_kind]

    @numba.njit(nogil=True)
    def all_scores(
        q: int, lines: int, places: int, groups: int, head_dim: int, out: int, stride: int
    ) -> None:
        line = 0
        while line < lines:
            left = lines - line
            at, to = q + line * 4 * head_dim, out + line * stride
            if left >= 8:
                scores(level, kind, 8, at, places, groups, head_dim, to, stride)
                line += 8
            elif left >= 4:
                scores(level, kind, 4, at, places, groups, head_dim, to, stride)
                line += 4
            elif left == 3:
                scores(level, kind, 3, at, places, groups, head_dim, to, stride)
                line += 3
            elif left == 2:
                scores(level, kind, 2, at, places, groups, head_dim, to, stride)
                line += 2
            else:
                scores(level, kind, 1, at, places, groups, head_dim, to, stride)
                line += 1

    @numba.njit(nogil=True)
    def all_values(
        p: int, lines: int, stride: int, places: int, keys: int, head_dim: int, out: int
    ) -> None:
        line, row = 0, head_dim * size
        while line < lines:
            left = lines - line
            at, to = p + line * stride, out + line * 4 * head_dim
            taken = 1
            vector = 0
            while vector < head_dim // 16:
                more = head_dim // 16 - vector
                skip, place = vector * 16 * size, to + 64 * vector
                width = 1
                if left >= 8 and more >= 2:
                    weighted_values(
                        level, kind, 8, 2, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    taken, width = 8, 2
                elif left >= 8:
                    weighted_values(
                        level, kind, 8, 1, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    taken = 8
                elif left >= 4 and more >= 4:
                    weighted_values(
                        level, kind, 4, 4, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    taken, width = 4, 4
                elif left >= 4:
                    weighted_values(
                        level, kind, 4, 1, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    taken = 4
                elif left == 3 and more >= 4:
                    weighted_values(
                        level, kind, 3, 4, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    taken, width = 3, 4
                elif left == 3:
                    weighted_values(
                        level, kind, 3, 1, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    taken = 3
                elif left == 2 and more >= 4:
                    weighted_values(
                        level, kind, 2, 4, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    taken, width = 2, 4
                elif left == 2:
                    weighted_values(
                        level, kind, 2, 1, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    taken = 2
                elif more >= 4:
                    weighted_values(
                        level, kind, 1, 4, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                    width = 4
                else:
                    weighted_values(
                        level, kind, 1, 1, at, stride, places, keys, row, skip, place, 4 * head_dim
                    )
                vector += width
            line += taken

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        head_dim, query_heads = load_i64(p + A.head_dim), load_i64(p + A.heads)
        kv_heads, block_tokens = load_i64(p + A.kv_heads), load_i64(p + A.block_tokens)
        window, stride = load_i64(p + A.window), load_i64(p + A.score_stride)
        each = _per_unit(step, load_i64(p + A.rule))  # heads
        parts = query_heads // each
        tile = load_i64(p + A.tiles) + 16 * (unit // parts)
        first_head = unit % parts * each
        kv_head = first_head // (query_heads // kv_heads)
        first, rows = load_i64(tile), load_i64(tile + 8)
        positions = load_i64(p + A.positions) + 8 * first
        # The keys any of the rows sees, from a multiple of 16 on.
        low = 0
        if window != 0:
            low = max(0, load_i64(positions) - window + 1) // 16 * 16
        keys = load_i64(positions + 8 * (rows - 1)) + 1 - low
        groups = (keys + 15) // 16

        scratch = load_i64(p + A.scratch) + thread * load_i64(p + A.scratch_stride)
        lines = rows * each
        queries = scratch
        results = queries + lines * 4 * head_dim
        key_places = results + lines * 4 * head_dim
        value_places = key_places + stride  # more than enough: 8 bytes for each 16 keys
        weights = value_places + stride

        slot = load_i64(load_i64(p + A.slots) + 8 * first)
        table = load_i64(p + A.tables) + slot * load_i64(p + A.table_stride)
        keys_at, values_at = load_i64(p + A.keys), load_i64(p + A.values)
        for group in range(groups):
            position = low + 16 * group
            block = _block_at(table, position // block_tokens)
            place = (block * kv_heads + kv_head) * block_tokens * head_dim * size
            place += position % block_tokens * head_dim * size  # the same for both: whole 16s
            store_i64(key_places + 8 * group, keys_at + place)
            store_i64(value_places + 8 * group, values_at + place)

        qkv, qkv_stride = load_i64(p + A.qkv), load_i64(p + A.stride)
        for line in range(lines):
            head, row = first_head + line % each, first + line // each
            source = qkv + row * qkv_stride + 4 * head_dim * head
            for i in range(head_dim):
                store_f32(queries + 4 * (line * head_dim + i), load_f32(source + 4 * i))
        all_scores(queries, lines, key_places, groups, head_dim, weights, stride)
        cap = load_f32(p + A.softcap)
        for line in range(lines):
            position = load_i64(positions + 8 * (line // each))
            of_line = weights + line * stride
            if cap != 0:
                softcapped(of_line, cap, groups)
            seen = position + 1 - low
            hidden(of_line + 4 * seen, 16 * groups - seen)
            if window != 0 and seen > window:
                hidden(of_line, seen - window)
            total = softmax_numerators(of_line, groups)
            # Kept behind the weights' last group until the values are added up.
            store_f32(of_line + stride - 4, total)
        all_values(weights, lines, stride, value_places, keys, head_dim, results)
        quants = load_i64(p + A.quantised)
        for line in range(lines):
            head, row = first_head + line % each, first + line // each
            one = numba.float32(1.0)
            total = load_f32(weights + line * stride + stride - 4)
            found = results + line * 4 * head_dim
            multiplied(found, one / total, head_dim // 16)
            out = load_i64(p + A.out) + row * load_i64(p + A.out_stride)
            for i in range(head_dim):
                store_f32(out + 4 * (head * head_dim + i), load_f32(found + 4 * i))
            if quants != 0:
                target = quants + row * load_i64(p + A.quantised_stride)
                chunks = head_dim // 32
                quantised(out, target, query_heads * head_dim, head * chunks, chunks)

    return kernel


def quantise() -> Kernel:
    """The int8 form of rows, where no other kernel can make it."""
    Q = s.QUANTISE

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        each, columns = _per_unit(step, load_i64(p + Q.rule)), load_i64(p + Q.columns)
        rows = load_i64(step + WORD * ROWS)
        for row in range(unit * each, min(rows, unit * each + each)):
            x = load_i64(p + Q.x) + row * load_i64(p + Q.x_stride)
            out = load_i64(p + Q.out) + row * load_i64(p + Q.out_stride)
            quantised(x, out, columns, 0, columns // 32)

    return kernel


def arrival() -> Kernel:
    """A step's rows, from where the host wrote them; a token below 0 is what was chosen before.

    That is, the token that the step before chose in the same place of its rows.
    """
    R = s.ARRIVAL

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        turn = load_i64(step + WORD * s.TURN) + 1
        store_i64(step + WORD * s.TURN, turn)
        new = turn % 2 * load_i64(p + R.new_stride)
        chosen = load_i64(p + R.results) + (1 - turn % 2) * load_i64(p + R.results_stride)
        for row in range(load_i64(step + WORD * ROWS)):
            token = load_i64(load_i64(p + R.new_tokens) + new + WORD * row)
            if token < 0:
                token = max(load_i64(chosen + WORD * row), 0)
            position = load_i64(load_i64(p + R.new_positions) + new + WORD * row)
            store_i64(load_i64(p + R.tokens) + WORD * row, token)
            store_i64(load_i64(p + R.positions) + WORD * row, position)

    return kernel


def embedding(isa: Isa, form: str) -> Kernel:
    """Rows of the embedding, unpacked and scaled: the residual stream's beginning."""
    level, number = int(isa), TILE_FORMS.index(form)

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        each = _per_unit(step, load_i64(p + E.rule))
        rows = load_i64(step + WORD * ROWS)
        for row in range(unit * each, min(rows, unit * each + each)):
            token = load_i64(load_i64(p + E.tokens) + 8 * row)
            tile = load_i64(p + E.tiles) + token // 16 * load_i64(p + E.tile_bytes)
            out = load_i64(p + E.out) + row * load_i64(p + E.out_stride)
            columns, scale = load_i64(p + E.columns), load_f32(p + E.scale)
            unpack_lane(level, number, tile, columns, token % 16, scale, out)

    return kernel


def angles() -> Kernel:
    """Cosines, then sines, of each row's rotary angles, worked out in float64."""
    T = s.ANGLES

    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        each, half = _per_unit(step, load_i64(p + T.rule)), load_i64(p + T.half)
        scale, frequencies = load_f32(p + T.scale), load_i64(p + T.frequencies)
        rows = load_i64(step + WORD * ROWS)
        for row in range(unit * each, min(rows, unit * each + each)):
            position = load_i64(load_i64(p + T.positions) + 8 * row)
            out = load_i64(p + T.out) + row * load_i64(p + T.stride)
            for i in range(half):
                angle = position * load_f64(frequencies + 8 * i)
                store_f32(out + 4 * i, numba.float32(math.cos(angle) * scale))
                store_f32(out + 4 * (half + i), numba.float32(math.sin(angle) * scale))

    return kernel
