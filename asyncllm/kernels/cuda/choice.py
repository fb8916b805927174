"""Choosing tokens from logits: the most likely one, or by chance among what filters leave.

The same choice as `sampling/filters.py` makes in float64, up to the rounding of float32 weights.
Weights are integers here, in units of 2**-40 of the most likely token's, so sums do not depend on
their order: a row's choice depends on nothing but the row, however it is cut into parts.

What filters keep is a run from the front of the tokens sorted by logit (equal ones by id). Its end
is searched digit by digit, from the highest four bits of a logit down: each launch sums up, for
each value of the next digit, the tokens (top_k) or the weights (top_p) that begin with the digits
found so far. A fixed number of launches serves every row; those that need no search leave at once.

Nothing here allocates or synchronises, except what makes the scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.cuda.rows import launch_options, softcapped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DIGITS = 8  # of four bits
_BLOCK = 1024  # columns taken at a time where a row is only read
_SEARCH_BLOCK = 128  # and where each column is told apart by its digit

_GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)  # as sampling/filters.py
_WEIGHT_ONE: tl.constexpr = tl.constexpr(float(1 << 40))
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_NOT_A_NUMBER: tl.constexpr = tl.constexpr((1 << 63) - 1)

# What stands for a token where none can be chosen: a logit is NaN, the largest is inf, or all are
# -inf.
SICK = {-1: float("nan"), -2: float("inf"), -3: float("-inf")}

_NOTHING: tl.constexpr = tl.constexpr(-(1 << 63))

TOP_K: tl.constexpr = tl.constexpr(0)
TOP_P: tl.constexpr = tl.constexpr(1)

# Numbers of a search that its launches hand on.
_STATE: tl.constexpr = tl.constexpr(4)
# Slots of them for a row: one for each launch of both searches, and one for the draw.
_SLOTS: tl.constexpr = tl.constexpr(2 * _DIGITS + 1)
_SEARCHES: tl.constexpr = tl.constexpr(_DIGITS)
IN_PROMPT = 0x8000
_IN_PROMPT: tl.constexpr = tl.constexpr(IN_PROMPT)


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row's token is chosen; tensors of M elements on the device.

    Attributes:
        temperature: float32; 0 takes the most likely.
        top_k: int32; 0 and the vocabulary's size are off.
        top_p: float32; 1 and more is off.
        min_p: float32; 0 is off.
        seeds: int32 [M, 2], low and high words.
        outputs: int32, output tokens before the one to be chosen.
        indices: int32, which of the request's `n` outputs.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    outputs: Tensor
    indices: Tensor


@dataclass(frozen=True, slots=True)
class ChoiceScratch:
    """What the launches of a choice leave for each other.

    Attributes:
        parts: programs that share a row.
        width: columns of a part.
        peaks: int64 [rows, parts]: the largest logit of each part, and where.
        sums: int64 [rows, 2, digits, parts, 16].
        states: int64 [rows, slots, 4].
        shares: int64 [rows, parts, 2]: of each part the weight that is kept, and the tokens at the
            border.
    """

    parts: int
    width: int
    peaks: Tensor
    sums: Tensor
    states: Tensor
    shares: Tensor

    @classmethod
    def of(
        cls, rows: int, vocabulary: int, device: torch.device | str, parts: int | None = None
    ) -> ChoiceScratch:
        """Working memory for up to `rows` rows."""
        import torch

        if parts is None:
            parts = 128 if rows <= 4 else 16  # two sizes, so that little has to be compiled
        width = triton.cdiv(triton.cdiv(vocabulary, parts), _SEARCH_BLOCK) * _SEARCH_BLOCK
        parts = triton.cdiv(vocabulary, width)

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int64, device=device)

        return cls(
            parts,
            width,
            numbers(parts),
            numbers(2, _DIGITS, parts, 16),
            numbers(_SLOTS.value, _STATE.value),
            numbers(parts, 2),
        )


@triton.jit
def _ordered(x):
    """Of float32 the bits, so that as uint32 they order as the floats do; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _unordered(key):
    """The float32 of an ordered key, which is int64 here."""
    bits = tl.where(key >= 2147483648, key - 2147483648, 4294967295 - key)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, peak, rate, min_p):
    """Probability relative to the most likely token's, in units of 2**-40; 0 below `min_p`."""
    weight = tl.exp2((x - peak) * rate)
    return tl.where(weight >= min_p, weight * _WEIGHT_ONE, 0.0).to(tl.int64)


@triton.jit
def _multiplied(word, multiplier: tl.constexpr):
    """High and low word of a product; words are int64 of 0 to 2**32 - 1."""
    low = multiplier * (word & 0xFFFF)
    high = multiplier * (word >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & 0xFFFFFFFF


@triton.jit
def _uniform(seed_low, seed_high, output, index):
    """`sampling.philox.uniform`: a float64 in [0, 1) of 53 bits."""
    mask: tl.constexpr = 0xFFFFFFFF
    k0, k1 = seed_low.to(tl.int64) & mask, seed_high.to(tl.int64) & mask
    c0, c2 = output.to(tl.int64) & mask, index.to(tl.int64) & mask
    c1, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        high0, low0 = _multiplied(c0, 0xD2511F53)
        high1, low1 = _multiplied(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return ((c0 >> 5) * 67108864 + (c1 >> 6)).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _uniforms(seeds, outputs, indices, out):
    row = tl.program_id(0)
    number = _uniform(
        tl.load(seeds + row * 2), tl.load(seeds + row * 2 + 1),
        tl.load(outputs + row), tl.load(indices + row),
    )  # fmt: skip
    tl.store(out + row, number)


def uniforms(seeds: Tensor, outputs: Tensor, indices: Tensor, out: Tensor) -> None:
    """The numbers that `sample` draws with, float64 [M]; see `Draws` for the rest."""
    _uniforms[(len(out),)](seeds, outputs, indices, out, num_warps=1)


@triton.jit
def _peaks(
    logits, peaks, stride,
    V: tl.constexpr, CAP: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    best = tl.full([BLOCK], _NOTHING, tl.int64)
    end = tl.minimum(part * WIDTH + WIDTH, V)
    for base in tl.range(0, WIDTH, BLOCK):
        column = part * WIDTH + base + tl.arange(0, BLOCK)
        inside = column < end
        x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
        if CAP > 0:
            x = softcapped(x, CAP)
            tl.store(logits + row * stride + column, x, mask=inside)
        # Unique keys, the lower id first among equal logits.
        key = ((_ordered(x).to(tl.int64) - 2147483648) << 32) - column
        key = tl.where(x != x, _NOT_A_NUMBER, key)
        best = tl.maximum(best, tl.where(inside, key, _NOTHING))
    tl.store(peaks + row * PARTS + part, tl.max(best, 0))


@triton.jit
def _best(peaks, row, PARTS: tl.constexpr, PARTS2: tl.constexpr):
    """The row's most likely token, or one of `SICK`, and its logit."""
    part = tl.arange(0, PARTS2)
    key = tl.max(tl.load(peaks + row * PARTS + part, mask=part < PARTS, other=_NOTHING), 0)
    high = -((-key) >> 32)
    token = (high << 32) - key
    sick = key == _NOT_A_NUMBER
    value = _unordered(tl.where(sick, 0, high + 2147483648))
    token = tl.where(value == float("inf"), -2, tl.where(value == float("-inf"), -3, token))
    return tl.where(sick, -1, token).to(tl.int32), value


@triton.jit
def _greedy(peaks, tokens, PARTS: tl.constexpr, PARTS2: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token, _ = _best(peaks, row, PARTS, PARTS2)
    tl.store(tokens + row, token)


@triton.jit
def _parameters(
    peaks, temperatures, top_ks, top_ps, min_ps, row,
    V: tl.constexpr, PARTS: tl.constexpr, PARTS2: tl.constexpr,
):  # fmt: skip
    """What a row's launches need: its best token, and what is to be done, if anything is."""
    token, peak = _best(peaks, row, PARTS, PARTS2)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    drawn = (token >= 0) & (temperature >= _GREEDY_BELOW)
    rate = _LOG2_E / tl.where(drawn, temperature, 1.0)
    by_k = drawn & (top_k > 0) & (top_k < V)
    by_p = drawn & (top_p < 1.0)
    return token, peak, rate, tl.load(min_ps + row), top_k.to(tl.int64), top_p, drawn, by_k, by_p


@triton.jit
def _summed(sums, PARTS: tl.constexpr, PARTS2: tl.constexpr):
    """Of each digit what all parts found, int64 [16]."""
    part = tl.arange(0, PARTS2)[:, None]
    at = sums + part * 16 + tl.arange(0, 16)[None, :]
    return tl.sum(tl.load(at, mask=part < PARTS, other=0), 0)


@triton.jit
def _next_digit(column, prefix, above, target):
    """The largest digit up to which, from above, `target` is reached.

    Returns the digits so far, what lies above them, and what begins with them.
    """
    digit = tl.arange(0, 16)
    larger = digit[None, :] > digit[:, None]
    over = above + tl.sum(tl.where(larger, column[None, :], 0), 1)
    chosen = tl.max(tl.where(over + column >= target, digit, 0), 0)
    own = digit == chosen
    above = tl.sum(tl.where(own, over, 0), 0)
    return prefix * 16 + chosen, above, tl.sum(tl.where(own, column, 0), 0)


@triton.jit
def _search(
    logits, peaks, sums, states, temperatures, top_ks, top_ps, min_ps, stride,
    V: tl.constexpr, PARTS: tl.constexpr, PARTS2: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, BY: tl.constexpr, DIGIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum up by the digit after those found so far, which all programs of a row find again."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, peak, rate, min_p, top_k, top_p, _, by_k, by_p = _parameters(
        peaks, temperatures, top_ks, top_ps, min_ps, row, V, PARTS, PARTS2
    )
    runs = by_k if BY == TOP_K else by_p
    if runs:
        table = sums + row * (2 * _SEARCHES * PARTS * 16)
        k_table, p_table = table, table + _SEARCHES * PARTS * 16
        k_state = states + row * (_SLOTS * _STATE)
        p_state = k_state + _SEARCHES * _STATE
        prefix = top_k * 0
        above = prefix
        floor = prefix  # of keys that top_k leaves
        if BY == TOP_K:
            if DIGIT > 0:
                if DIGIT > 1:
                    before = k_state + (DIGIT - 1) * _STATE
                    prefix, above = tl.load(before), tl.load(before + 1)
                column = _summed(k_table + (DIGIT - 1) * PARTS * 16, PARTS, PARTS2)
                prefix, above, _at = _next_digit(column, prefix, above, top_k)
                if part == 0:
                    tl.store(k_state + DIGIT * _STATE, prefix)
                    tl.store(k_state + DIGIT * _STATE + 1, above)
            out = k_table + (DIGIT * PARTS + part) * 16
        else:
            if DIGIT == 0:
                excess = floor  # tokens equal to the last that top_k leaves, and left out by it
                if by_k:
                    before = k_state + (_SEARCHES - 1) * _STATE
                    column = _summed(k_table + (_SEARCHES - 1) * PARTS * 16, PARTS, PARTS2)
                    floor, over, at = _next_digit(
                        column, tl.load(before), tl.load(before + 1), top_k
                    )
                    excess = at - (top_k - over)
                if part == 0:
                    tl.store(p_state, floor)
                    tl.store(p_state + 1, excess)
            else:
                floor = tl.load(p_state)
                column = _summed(p_table + (DIGIT - 1) * PARTS * 16, PARTS, PARTS2)
                if DIGIT == 1:
                    spare = _weight(_unordered(floor), peak, rate, min_p)
                    whole = tl.sum(column, 0) - tl.where(by_k, tl.load(p_state + 1) * spare, 0)
                    share = tl.ceil(top_p.to(tl.float64) * whole.to(tl.float64))
                    target = tl.maximum(share.to(tl.int64), 1)
                else:
                    before = p_state + (DIGIT - 1) * _STATE
                    prefix, above = tl.load(before), tl.load(before + 1)
                    target = tl.load(before + 2)
                prefix, above, _at = _next_digit(column, prefix, above, target)
                if part == 0:
                    tl.store(p_state + DIGIT * _STATE, prefix)
                    tl.store(p_state + DIGIT * _STATE + 1, above)
                    tl.store(p_state + DIGIT * _STATE + 2, target)
            out = p_table + (DIGIT * PARTS + part) * 16

        digit = tl.arange(0, 16)
        shift: tl.constexpr = 28 - 4 * DIGIT
        end = tl.minimum(part * WIDTH + WIDTH, V)
        counted = tl.zeros([BLOCK, 16], tl.int32 if BY == TOP_K else tl.int64)
        for base in tl.range(0, WIDTH, BLOCK):
            place = part * WIDTH + base + tl.arange(0, BLOCK)
            inside = place < end
            x = tl.load(logits + row * stride + place, mask=inside, other=float("-inf"))
            key = _ordered(x)
            if DIGIT > 0:
                inside &= (key >> (shift + 4)) == prefix.to(tl.uint32)
            own = inside[:, None] & (((key >> shift) & 15).to(tl.int32)[:, None] == digit[None, :])
            if BY == TOP_K:
                counted += own.to(tl.int32)
            else:
                weight = _weight(x, peak, rate, min_p)
                weight = tl.where(key >= floor.to(tl.uint32), weight, 0)
                counted += tl.where(own, weight[:, None], 0)
        tl.store(out + digit, tl.sum(counted, 0).to(tl.int64))


@triton.jit
def _shares(
    logits, peaks, sums, states, shares, temperatures, top_ks, top_ps, min_ps, stride,
    V: tl.constexpr, PARTS: tl.constexpr, PARTS2: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The border of what is kept, and how much of it each part has."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, peak, rate, min_p, top_k, _, drawn, by_k, by_p = _parameters(
        peaks, temperatures, top_ks, top_ps, min_ps, row, V, PARTS, PARTS2
    )
    if drawn:
        table = sums + row * (2 * _SEARCHES * PARTS * 16)
        state = states + row * (_SLOTS * _STATE)
        # No number has the key 0.
        border = top_k * 0
        wanted = border  # tokens at the border that are kept, the lowest ids
        if by_p:
            before = state + (2 * _SEARCHES - 1) * _STATE
            column = _summed(table + (2 * _SEARCHES - 1) * PARTS * 16, PARTS, PARTS2)
            target = tl.load(before + 2)
            border, above, _at = _next_digit(column, tl.load(before), tl.load(before + 1), target)
            each = tl.maximum(_weight(_unordered(border), peak, rate, min_p), 1)
            wanted = (target - above + each - 1) // each
        elif by_k:
            before = state + (_SEARCHES - 1) * _STATE
            column = _summed(table + (_SEARCHES - 1) * PARTS * 16, PARTS, PARTS2)
            border, above, _at = _next_digit(column, tl.load(before), tl.load(before + 1), top_k)
            wanted = top_k - above
        if part == 0:
            tl.store(state + (_SLOTS - 1) * _STATE, border)
            tl.store(state + (_SLOTS - 1) * _STATE + 1, wanted)
        end = tl.minimum(part * WIDTH + WIDTH, V)
        kept = tl.zeros([BLOCK], tl.int64)
        level = tl.zeros([BLOCK], tl.int32)
        for base in tl.range(0, WIDTH, BLOCK):
            place = part * WIDTH + base + tl.arange(0, BLOCK)
            inside = place < end
            x = tl.load(logits + row * stride + place, mask=inside, other=float("-inf"))
            key = _ordered(x)
            over = inside & (key > border.to(tl.uint32))
            kept += tl.where(over, _weight(x, peak, rate, min_p), 0)
            level += (inside & (key == border.to(tl.uint32))).to(tl.int32)
        at = shares + (row * PARTS + part) * 2
        tl.store(at, tl.sum(kept, 0))
        tl.store(at + 1, tl.sum(level, 0).to(tl.int64))


@triton.jit
def _draw(
    logits, peaks, states, shares, temperatures, top_ks, top_ps, min_ps, seeds, outputs, indices,
    tokens, stride,
    V: tl.constexpr, PARTS: tl.constexpr, PARTS2: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token by weight among what is kept, in the vocabulary's order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token, peak, rate, min_p, _, _, drawn, _, _ = _parameters(
        peaks, temperatures, top_ks, top_ps, min_ps, row, V, PARTS, PARTS2
    )
    if drawn:
        state = states + row * (_SLOTS * _STATE) + (_SLOTS - 1) * _STATE
        border, wanted = tl.load(state), tl.load(state + 1)
        level = tl.where(border > 0, _weight(_unordered(border), peak, rate, min_p), 0)
        part = tl.arange(0, PARTS2)
        at = shares + (row * PARTS + part) * 2
        own = tl.load(at, mask=part < PARTS, other=0)
        level_tokens = tl.load(at + 1, mask=part < PARTS, other=0)
        earlier = tl.cumsum(level_tokens, 0) - level_tokens
        taken = tl.minimum(tl.maximum(wanted - earlier, 0), level_tokens)
        own += taken * level
        reached = tl.cumsum(own, 0)
        total = tl.sum(own, 0)
        number = _uniform(
            tl.load(seeds + row * 2), tl.load(seeds + row * 2 + 1),
            tl.load(outputs + row), tl.load(indices + row),
        )  # fmt: skip
        aim = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
        # The first at which the running sum exceeds the aim: a part, then a token of it.
        where = tl.sum((reached <= aim).to(tl.int32), 0)
        before = tl.sum(tl.where(part < where, own, 0), 0)
        seen = tl.sum(tl.where(part < where, level_tokens, 0), 0)
        start = where * WIDTH
        end = tl.minimum(start + WIDTH, V)
        found = tl.full([], V, tl.int32)
        while (found == V) & (start < end):
            place = start + tl.arange(0, BLOCK)
            inside = place < end
            x = tl.load(logits + row * stride + place, mask=inside, other=float("-inf"))
            key = _ordered(x)
            equal = (inside & (key == border.to(tl.uint32))).to(tl.int64)
            among = (equal > 0) & (seen + tl.cumsum(equal, 0) <= wanted)
            over = inside & (key > border.to(tl.uint32))
            weight = tl.where(over | among, _weight(x, peak, rate, min_p), 0)
            running = before + tl.cumsum(weight, 0)
            found = tl.min(tl.where(running > aim, place, V), 0)
            before += tl.sum(weight, 0)
            seen += tl.sum(equal, 0)
            start += BLOCK
        token = tl.where(found < V, found, token)
    tl.store(tokens + row, token)


def greedy(
    logits: Tensor,
    tokens: Tensor,
    scratch: ChoiceScratch,
    *,
    cap: float = 0.0,
    pdl: bool = False,
) -> None:
    """The most likely token of each row, the lowest of equals, or one of `SICK`.

    Args:
        logits: float32 [M, vocabulary]; capped in place with `cap`.
        tokens: int32 [M], written.
        scratch: for as many rows of this vocabulary.
        cap: softcap; 0: none.
        pdl: programmatic dependent launch.
    """
    _find_peaks(logits, scratch, cap, pdl)
    _greedy[(len(logits),)](
        scratch.peaks, tokens, PARTS=scratch.parts, PARTS2=triton.next_power_of_2(scratch.parts),
        PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


def sample(
    logits: Tensor,
    draws: Draws,
    tokens: Tensor,
    scratch: ChoiceScratch,
    *,
    cap: float = 0.0,
    searches: tuple[bool, bool] = (True, True),
    pdl: bool = False,
) -> None:
    """One token of each row, as its draw says; greedy ones among them are fine.

    Args:
        logits: float32 [M, vocabulary]; capped in place with `cap`.
        draws: how.
        tokens: int32 [M], written; one of `SICK` where no token can be chosen.
        scratch: for as many rows of this vocabulary.
        cap: softcap; 0: none.
        searches: whether any row may have top_k, and top_p, on: launches that need not be made.
        pdl: programmatic dependent launch.
    """
    rows, vocabulary = logits.shape
    parts = scratch.parts
    sizes = {
        "V": vocabulary,
        "PARTS": parts,
        "PARTS2": triton.next_power_of_2(parts),
        "WIDTH": scratch.width,
        "PDL": pdl,
        "num_warps": 4,
        **launch_options(pdl),
    }
    how = (draws.temperature, draws.top_k, draws.top_p, draws.min_p)
    _find_peaks(logits, scratch, cap, pdl)
    for by in (TOP_K, TOP_P):
        for digit in range(_DIGITS if searches[by.value] else 0):
            _search[(parts, rows)](
                logits, scratch.peaks, scratch.sums, scratch.states, *how, logits.stride(0),
                BLOCK=_SEARCH_BLOCK, BY=by, DIGIT=digit, **sizes,
            )  # fmt: skip
    _shares[(parts, rows)](
        logits, scratch.peaks, scratch.sums, scratch.states, scratch.shares, *how,
        logits.stride(0), BLOCK=_BLOCK, **sizes,
    )  # fmt: skip
    _draw[(rows,)](
        logits, scratch.peaks, scratch.states, scratch.shares, *how,
        draws.seeds, draws.outputs, draws.indices, tokens, logits.stride(0),
        BLOCK=_BLOCK, **sizes,
    )  # fmt: skip


def _find_peaks(logits: Tensor, scratch: ChoiceScratch, cap: float, pdl: bool) -> None:
    rows, vocabulary = logits.shape
    _peaks[(scratch.parts, rows)](
        logits, scratch.peaks, logits.stride(0),
        V=vocabulary, CAP=float(cap), PARTS=scratch.parts, WIDTH=scratch.width, BLOCK=_BLOCK,
        PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edits:
    """What changes logits before a choice; for each sequence's slot, on the device.

    Attributes:
        repetition: float32 [slots]; 1 is off.
        presence: float64 [slots]; 0 is off.
        frequency: float64 [slots]; 0 is off.
        counts: int32 or int16 [slots, vocabulary]: how often the output has each token, up to
            2**15 - 1, and the bit `IN_PROMPT` where the prompt has it.
        bias_ids: int32 [slots, most]: tokens.
        biases: float32 [slots, most]; -inf forbids a token.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    counts: Tensor
    bias_ids: Tensor
    biases: Tensor


@triton.jit
def _edit(
    logits, slots, holding, repetitions, presences, frequencies, counts, bias_ids, biases,
    stride, most,
    V: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < V
        x = tl.load(logits + row * stride + place, mask=inside, other=0.0)
        if CAP > 0:
            x = softcapped(x, CAP)
        left = tl.load(holding + row)
        if left >= 0:
            while left > 0:
                left -= 1
                token = tl.load(bias_ids + slot * most + left)
                x += tl.where(place == token, tl.load(biases + slot * most + left), 0.0)
            repetition = tl.load(repetitions + slot)
            presence, frequency = tl.load(presences + slot), tl.load(frequencies + slot)
            if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
                count = tl.load(counts + slot * V + place, mask=inside, other=0).to(tl.int32)
                times = count & (_IN_PROMPT - 1)
                # Divided and added up as the sampler does it, to the bit.
                scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
                x = tl.where(count != 0, scaled, x)
                taken = (presence + frequency * times.to(tl.float64)).to(tl.float32)
                x -= tl.where(times > 0, taken, 0.0)
        tl.store(logits + row * stride + place, x, mask=inside)


def edit(
    logits: Tensor,
    edits: Edits,
    slots: Tensor,
    holding: Tensor,
    *,
    cap: float = 0.0,
    pdl: bool = False,
) -> None:
    """Softcap, biases and penalties, in this order and in place.

    Args:
        logits: float32 [M, vocabulary]. What chooses afterwards must not cap them again.
        edits: how.
        slots: int32 [M], each row's place in `edits`; below 0: the row stays as it is.
        holding: int32 [M], how many of its slot's biases hold for a row; below 0: the row is capped
            and no more, whatever its slot has.
        cap: softcap; 0: none.
        pdl: programmatic dependent launch.
    """
    rows, vocabulary = logits.shape
    _edit[(triton.cdiv(vocabulary, _BLOCK), rows)](
        logits, slots, holding, edits.repetition, edits.presence, edits.frequency, edits.counts,
        edits.bias_ids, edits.biases, logits.stride(0), edits.biases.stride(0),
        V=vocabulary, CAP=float(cap), BLOCK=_BLOCK, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _count(tokens, slots, counts, V: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    token, slot = tl.load(tokens + row), tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (token >= 0):
        at = counts + slot * V + token
        old = tl.load(at)
        # A full count stays full rather than become another flag.
        full = (old.to(tl.int32) & (_IN_PROMPT - 1)) == _IN_PROMPT - 1
        tl.store(at, tl.where(full, old, old + 1).to(counts.dtype.element_ty))


def count(tokens: Tensor, slots: Tensor, counts: Tensor, *, pdl: bool = False) -> None:
    """Each row's output has one more token; see `Edits`. Rows with a slot or token below 0 stay."""
    _count[(len(tokens),)](
        tokens, slots, counts, V=counts.shape[1], PDL=pdl, num_warps=1, **launch_options(pdl)
    )
