"""The product of `tensor_cores.py` for Hopper cards, in Gluon, which says where things are.

Words of the weight come to shared memory by asynchronous copies, some steps ahead, and each thread
takes from there just the words whose codes it is to hand to the tensor cores: what it unpacks goes
from its registers to them. A thread's word has columns that lie apart, so the columns of
activations are in another order: that of `ordered` rows in `rows.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
)

# Bytes of a word as float16, 0 and 1, 2 and 3, less an offset, times a scale, plus a minimum: a
# byte under the exponent of 1024 is 1024 and itself. The rest of the operands are pairs of float16.
_WIDEN: Final = gl.constexpr(
    "{ .reg .b32 t, k; mov.b32 k, 0x64646464;"
    " prmt.b32 t, $2, k, 0x4140; add.rn.f16x2 t, t, $5; fma.rn.f16x2 $0, t, $3, $4;"
    " prmt.b32 t, $2, k, 0x4342; add.rn.f16x2 t, t, $5; fma.rn.f16x2 $1, t, $3, $4; }"
)


@gluon.jit
def _order(kind: gl.constexpr, anything):
    """Programmatic dependent launch: let the next kernel start, or wait for the one before."""
    gl.inline_asm_elementwise(
        "griddepcontrol." + kind + "; mov.b32 $0, $1;", "=r,r", [anything], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


# Two bytes of a word as float16, less an offset, times a pair of float16: each as a pair of equals.
_SCALE: Final = gl.constexpr(
    "{ .reg .b32 t, k; mov.b32 k, 0x64646464; prmt.b32 t, $2, k, 0x4140;"
    " add.rn.f16x2 t, t, $4; mul.rn.f16x2 t, t, $3;"
    " prmt.b32 $0, t, t, 0x1010; prmt.b32 $1, t, t, 0x3232; }"
)


@gluon.jit
def _twice(word, pick: gl.constexpr):
    """One half of a word in both."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, " + pick + ";", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _scale(bytes_, pair, offset):
    return gl.inline_asm_elementwise(
        _SCALE, "=&r,=&r,r,r,r", [bytes_, pair, offset],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _widen(word, scale, least, offset):
    return gl.inline_asm_elementwise(
        _WIDEN, "=&r,=&r,r,r,r,r", [word, scale, least, offset],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _halves(word):
    low = (word & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)
    high = (word >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def tensor_rows_kernel(
    codes, upper, scales, supers, x, bias, out, N, M, x_stride, out_stride, split_stride,
    K: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, S: gl.constexpr, SPLITS: gl.constexpr,
    BIAS: gl.constexpr, FORM: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
    WORDS: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """BN rows of the weight by BM rows of activations, over one of SPLITS parts of the columns.

    As `_tensor_rows` in `tensor_cores.py`; S divides the sub-blocks of a row, and SPLITS the steps.
    """
    BITS: gl.constexpr = FORM[0]
    OFFSET: gl.constexpr = FORM[1] if BITS < 8 else 128
    MINIMUM: gl.constexpr = FORM[4]
    SUPER: gl.constexpr = FORM[5] == 1
    SUBS: gl.constexpr = K // 32
    STEPS: gl.constexpr = SUBS // S
    EACH: gl.constexpr = STEPS // SPLITS
    warps: gl.constexpr = gl.num_warps()
    words_at: gl.constexpr = WORDS
    blocks_at: gl.constexpr = BLOCKS
    subs_at: gl.constexpr = gl.SliceLayout(2, blocks_at)
    acc_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BM, 16])
    a_at: gl.constexpr = gl.DotOperandLayout(0, acc_at, 2)
    x_at: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (4 * S), 4 * S], [warps, 1], [1, 0])
    from_words: gl.constexpr = gl.BlockedLayout([1, 4], [32 // S, S], [warps, 1], [1, 0])
    from_pairs: gl.constexpr = gl.BlockedLayout([1, 2], [32 // S, S], [warps, 1], [1, 0])
    from_scales: gl.constexpr = gl.BlockedLayout([1, S], [32, 1], [warps, 1], [1, 0])
    words_in: gl.constexpr = gl.SwizzledSharedLayout(
        4, 1 if S >= 8 else 2, 8 if S >= 8 else 4, [1, 0]
    )
    plain_in: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_in: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, 32 * S], gl.float16)

    row0 = gl.program_id(0) * BN
    first = gl.program_id(2) * EACH
    raw = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 4 * S], words_in)
    if BITS == 8:
        raw8 = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 4 * S], words_in)
    if BITS == 6:
        raw2 = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 2 * S], plain_in)
    if BITS == 5:
        raw1 = gl.allocate_shared_memory(gl.int32, [STAGES, BN, S], plain_in)
    raw_scales = gl.allocate_shared_memory(scales.dtype.element_ty, [STAGES, BN, S], plain_in)
    raw_x = gl.allocate_shared_memory(gl.float16, [STAGES, BM, 32 * S], x_in)

    wr = gl.minimum(row0 + gl.arange(0, BN, gl.SliceLayout(1, from_words)), N - 1).to(gl.int64)
    wc = gl.arange(0, 4 * S, gl.SliceLayout(0, from_words))
    words_from = codes + wr[:, None] * (SUBS * (8 if BITS == 8 else 4)) + wc[None, :]
    sr = gl.minimum(row0 + gl.arange(0, BN, gl.SliceLayout(1, from_scales)), N - 1).to(gl.int64)
    sc = gl.arange(0, S, gl.SliceLayout(0, from_scales))
    scales_from = scales + sr[:, None] * SUBS + sc[None, :]
    upper_from = upper + sr[:, None] * SUBS + sc[None, :]
    if BITS == 6:
        ur = gl.minimum(row0 + gl.arange(0, BN, gl.SliceLayout(1, from_pairs)), N - 1).to(gl.int64)
        uc = gl.arange(0, 2 * S, gl.SliceLayout(0, from_pairs))
        pairs_from = upper + ur[:, None] * (SUBS * 2) + uc[None, :]
    m = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(1, x_at))
    xc = gl.arange(0, 32 * S, gl.SliceLayout(0, x_at))
    x_from = x + m[:, None].to(gl.int64) * x_stride + xc[None, :]
    x_mask = (m < M)[:, None] & (xc >= 0)[None, :]
    pr = gl.minimum(row0 + gl.arange(0, BN, gl.SliceLayout(1, subs_at)), N - 1).to(gl.int64)
    pc = gl.arange(0, S, gl.SliceLayout(0, subs_at))
    supers_from = supers + pr[:, None] * (SUBS // 8)
    j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, blocks_at)))[None, None, :]

    if PDL:
        _order("launch_dependents", row0)
    for early in gl.static_range(STAGES - 1):
        step = first + gl.minimum(early, EACH - 1)
        async_copy.async_copy_global_to_shared(raw.index(early), words_from + step * (4 * S))
        async_copy.async_copy_global_to_shared(raw_scales.index(early), scales_from + step * S)
        if BITS == 8:
            high_from = words_from + (SUBS * 4 + step * (4 * S))
            async_copy.async_copy_global_to_shared(raw8.index(early), high_from)
        if BITS == 6:
            pairs = pairs_from + step * (2 * S)
            async_copy.async_copy_global_to_shared(raw2.index(early), pairs)
        if BITS == 5:
            async_copy.async_copy_global_to_shared(raw1.index(early), upper_from + step * S)
    second = first + gl.minimum(1, EACH - 1)
    if SUPER:
        super_now = gl.load(supers_from + (first * S + pc[None, :]) // 8)
        super_next = gl.load(supers_from + (second * S + pc[None, :]) // 8)
    if PDL:
        _order("wait", row0)
    for early in gl.static_range(STAGES - 1):
        step = first + gl.minimum(early, EACH - 1)
        async_copy.async_copy_global_to_shared(
            raw_x.index(early), x_from + step * (32 * S), mask=x_mask
        )
        async_copy.commit_group()

    acc = gl.zeros([BN, BM], gl.float32, acc_at)
    # -1024 and less as pairs of float16, in whose steps of 1 this is counting.
    of_codes = gl.full([BN, S], 0xE400E400 - (1 << 32) + OFFSET * 0x10001, gl.int32, subs_at)
    of_codes = of_codes[:, :, None]
    of_scales = gl.full(
        [BN, S], 0xE400E400 - (1 << 32) + (0 if MINIMUM else 128 * 0x10001), gl.int32, subs_at
    )
    for number in range(EACH):
        stage = number % STAGES
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        # All are here, so all are done with the step before and its places.
        ahead = first + gl.minimum(number + STAGES - 1, EACH - 1)
        place = (number + STAGES - 1) % STAGES
        async_copy.async_copy_global_to_shared(raw.index(place), words_from + ahead * (4 * S))
        async_copy.async_copy_global_to_shared(raw_scales.index(place), scales_from + ahead * S)
        if BITS == 8:
            high_from = words_from + (SUBS * 4 + ahead * (4 * S))
            async_copy.async_copy_global_to_shared(raw8.index(place), high_from)
        if BITS == 6:
            pairs = pairs_from + ahead * (2 * S)
            async_copy.async_copy_global_to_shared(raw2.index(place), pairs)
        if BITS == 5:
            async_copy.async_copy_global_to_shared(raw1.index(place), upper_from + ahead * S)
        async_copy.async_copy_global_to_shared(
            raw_x.index(place), x_from + ahead * (32 * S), mask=x_mask
        )
        async_copy.commit_group()
        words = gl.reshape(raw.index(stage).load(words_at), [BN, S, 4])
        words = gl.convert_layout(words, blocks_at, assert_trivial=True)
        s = raw_scales.index(stage).load(subs_at)
        none = gl.full([BN, S], 0, gl.int32, subs_at)
        if SUPER and MINIMUM:
            # The minimum is taken away: its super-scale's sign is turned.
            a, least = _scale(s.to(gl.int32), super_now ^ -2147483648, of_scales)
            b = a
        elif SUPER:
            d = super_now.to(gl.int16, bitcast=True).to(gl.int32)
            a, b = _scale(s.to(gl.int32) ^ 0x8080, _twice(d, "0x1010"), of_scales)
            least = none
        elif MINIMUM:
            a = _twice(s, "0x1010")
            b = a
            least = _twice(s, "0x3232")
        else:
            a = _twice(s.to(gl.int16, bitcast=True).to(gl.int32), "0x1010")
            b = a
            least = none
        a, b, least = a[:, :, None], b[:, :, None], least[:, :, None]
        if BITS == 8:
            # Signed bytes, to 128 more.
            low = words ^ -2139062144
            high = gl.reshape(raw8.index(stage).load(words_at), [BN, S, 4])
            high = gl.convert_layout(high, blocks_at, assert_trivial=True) ^ -2139062144
        else:
            low = words & 0x0F0F0F0F
            high = (words >> 4) & 0x0F0F0F0F
        if BITS == 6:
            u, v = gl.split(gl.reshape(raw2.index(stage).load(PAIRS), [BN, S, 2]))
            u = gl.convert_layout(u, subs_at, assert_trivial=True)[:, :, None]
            v = gl.convert_layout(v, subs_at, assert_trivial=True)[:, :, None]
            low |= ((u >> (2 * j)) & 0x03030303) << 4
            high |= ((v >> (2 * j)) & 0x03030303) << 4
        if BITS == 5:
            bits = raw1.index(stage).load(subs_at)[:, :, None]
            low |= ((bits >> j) & 0x01010101) << 4
            high |= ((bits >> (4 + j)) & 0x01010101) << 4
        l0, l1 = _widen(low, a, least, of_codes)
        h0, h1 = _widen(high, b, least, of_codes)
        # [BN, S, 4 words, 2, 2 of a word, 2 halves]
        both = gl.join(gl.join(_halves(l0), _halves(l1)), gl.join(_halves(h0), _halves(h1)))
        weights = gl.reshape(gl.permute(both, (0, 1, 5, 4, 2, 3)), [BN, 32 * S])
        weights = gl.convert_layout(weights, a_at)
        acc = warpgroup_mma(weights, raw_x.index(stage).permute((1, 0)), acc)
        if SUPER:
            later = first + gl.minimum(number + 2, EACH - 1)
            super_now = super_next
            super_next = gl.load(supers_from + (later * S + pc[None, :]) // 8)
    async_copy.wait_group(0)
    n = row0 + gl.arange(0, BN, gl.SliceLayout(1, acc_at))
    column = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(0, acc_at))
    if BIAS:
        acc += gl.load(bias + n, mask=n < N, other=0.0)[:, None]
    target = out + gl.program_id(2).to(gl.int64) * split_stride
    target += column.to(gl.int64)[None, :] * out_stride + n[:, None]
    gl.store(target, acc, mask=(n < N)[:, None] & (column < M)[None, :])


@lru_cache
def layouts(owned: int, step: int, warps: int) -> dict[str, gl.DistributedLinearLayout]:
    """Where threads have what a step brings, by the kernel's names for it.

    Args:
        owned: rows of the weight of a program.
        step: sub-blocks of a step.
        warps: of a program.
    """
    subs = [1 << bit for bit in range(step.bit_length() - 1)]
    rows = [64 << bit for bit in range((owned // 64).bit_length() - 1)]
    more, warp = (rows, []) if warps == 4 else ([], rows)
    # Row, sub-block and word of it: as the tensor cores want the first of their operands.
    every = (
        [(8, 0, 0), *((0, sub, 0) for sub in subs), *((row, 0, 0) for row in more)],
        [(0, 0, 1), (0, 0, 2), (1, 0, 0), (2, 0, 0), (4, 0, 0)],
        [(16, 0, 0), (32, 0, 0), *((row, 0, 0) for row in warp)],
    )
    words = [[[row, 4 * sub + word] for row, sub, word in bases] for bases in every]
    pairs = [[[row, 2 * sub] for row, sub, _ in bases] for bases in every]
    pairs[0].insert(0, [0, 1])
    blocks = [[list(base) for base in bases] for bases in every]
    return {
        "WORDS": gl.DistributedLinearLayout(*words, [], [owned, 4 * step]),
        "PAIRS": gl.DistributedLinearLayout(*pairs, [], [owned, 2 * step]),
        "BLOCKS": gl.DistributedLinearLayout(*blocks, [], [owned, step, 4]),
    }
