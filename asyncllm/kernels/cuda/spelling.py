"""What the kernels share: how words of a weight's planes become codes and scales.

`weights.py` says what the planes hold. Codes are handled four to a 32-bit word, eight words to a
sub-block of 32 columns; every tensor here has one element for each sub-block, so that no step needs
another thread's data. The interpreter knows no inline assembly: with EMU the same is computed in
plain arithmetic.
"""

# ruff: noqa: RUF005, SIM108
# The language of kernels has tuples without unpacking.

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.cpu.tiles import E2M1_VALUES, IQ4_VALUES
from asyncllm.kernels.cuda.weights import DeviceWeight

EMULATED: Final[bool] = triton.knobs.runtime.interpret
"""Whether kernels are interpreted on the CPU (`TRITON_INTERPRET=1`)."""

# Values of a constexpr SCALE.
FLOAT16: Final = tl.constexpr(0)
SUPER: Final = tl.constexpr(1)
EXPONENT: Final = tl.constexpr(2)

_TABLES: Final[dict[tuple[int, ...] | None, int]] = {None: 0, IQ4_VALUES: 1, E2M1_VALUES: 2}


def _table_words(table: tuple[int, ...]) -> list[int]:
    """Signed bytes, four to a signed word, the first lowest."""
    return [
        int.from_bytes(
            bytes(value & 255 for value in table[start : start + 4]), "little", signed=True
        )
        for start in range(0, 16, 4)
    ]


_IQ4_WORDS: Final = tl.constexpr(tuple(_table_words(IQ4_VALUES)))
_E2M1_WORDS: Final = tl.constexpr(tuple(_table_words(E2M1_VALUES)))


def _look_up_assembly(table: tuple[int, ...]) -> str:
    """$0, $1: the values of the low and of the high nibbles of $2, signed bytes."""
    # A byte permutation looks four nibbles up in 8 bytes, so both halves of the table are asked,
    # and another picks by the nibbles' highest bits: 0, 1, 2, 3 from the first, 4 to 7 the second.
    steps = [
        f"mov.b32 t{place}, {word & 0xFFFFFFFF:#x};"
        for place, word in enumerate(_table_words(table))
    ]
    steps += [
        "and.b32 i, $2, 0x77777777;",
        "and.b32 s, $2, 0x88888888;",
        "shr.u32 s, s, 1;",
        "or.b32 s, s, 0x32103210;",
    ]
    for name in ("p", "q"):
        steps += [
            "prmt.b32 a, t0, t1, i;",
            "prmt.b32 b, t2, t3, i;",
            f"prmt.b32 {name}, a, b, s;",
            "shr.u32 i, i, 16;",
            "shr.u32 s, s, 16;",
        ]
    steps += ["prmt.b32 $0, p, q, 0x6420;", "prmt.b32 $1, p, q, 0x7531;"]
    return "{ .reg .b32 t0, t1, t2, t3, i, s, a, b, p, q; " + " ".join(steps) + " }"


def _dots_assembly(kind: str) -> str:
    """$0 and $1: the sums of the products of 16 bytes each, $2.. by $10.. and $6.. by $14.."""
    steps = [
        f"dp4a.{kind}.s32 {sum_}, ${first + place}, ${first + 8 + place}, {sum_ if place else 0};"
        for place in range(4)
        for sum_, first in (("l", 2), ("h", 6))
    ]
    return "{ .reg .b32 l, h; " + " ".join(steps) + " mov.b32 $0, l; mov.b32 $1, h; }"


_LOOK_UP_IQ4: Final = tl.constexpr(_look_up_assembly(IQ4_VALUES))
_LOOK_UP_E2M1: Final = tl.constexpr(_look_up_assembly(E2M1_VALUES))
_DOTS_UNSIGNED: Final = tl.constexpr(_dots_assembly("u32"))
_DOTS_SIGNED: Final = tl.constexpr(_dots_assembly("s32"))
_DOTS_CONSTRAINTS: Final = tl.constexpr("=r,=r" + ",r" * 16)


@dataclass(frozen=True, slots=True)
class Form:
    """A block format as kernels take it.

    Attributes:
        planes: codes, upper bits, uppermost bits, scales, super-scales; what a format lacks is
            some other plane.
        traits: the constexpr FORM of a kernel: BITS, OFFSET, TABLE (0, or which), GROUP, MINIMUM,
            SCALE, and PARTS, the number of tensors that `load_part` gives.
    """

    planes: tuple[Tensor, ...]
    traits: tuple[int, ...]


def form_of(weight: DeviceWeight) -> Form:
    """How a kernel reads a weight; ValueError for floats."""
    layout, planes = weight.layout, weight.planes
    if layout is None:
        raise ValueError(f"a weight in {weight.form} has no codes")
    names = {2: ("codes2",), 3: ("codes2", "codes1"), 4: ("codes4",), 5: ("codes4", "codes1")}
    names |= {6: ("codes4", "codes2"), 8: ("codes8",)}
    codes = [planes[name] for name in names[layout.bits]]
    scale = {"float16": 0, "super": 1, "exponent": 2}[layout.scale]
    upper = 2 if layout.bits in (3, 5, 6, 8) else 1
    offset = layout.offset if layout.bits < 8 else 0
    traits = (
        *(layout.bits, offset, _TABLES[layout.table], layout.group, int(layout.minimum), scale),
        upper + 1 + (scale == 1),
    )
    scales = planes["scales"]
    pointers = (codes[0], codes[-1], scales, planes.get("supers", scales))
    return Form(pointers, traits)


@triton.jit
def depend(PDL: tl.constexpr):
    """Let the next kernel start: it waits for this one's results itself."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Wait for what the kernel before writes."""
    if PDL:
        gdc_wait()


@triton.jit
def quarters(words, S: tl.constexpr):
    """The four words of each sub-block, [4 S] to four times [S]."""
    even, odd = tl.split(tl.reshape(words, [S, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def load_part(
    codes,
    upper,
    scales,
    supers,
    row,
    step,
    SUBS: tl.constexpr,
    S: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """What a row has for sub-blocks `step * S` and on: a tuple of PARTS tensors."""
    BITS: tl.constexpr = FORM[0]
    SCALE: tl.constexpr = FORM[5]
    c1 = step * S + tl.arange(0, S)
    c2 = step * (2 * S) + tl.arange(0, 2 * S)
    c4 = step * (4 * S) + tl.arange(0, 4 * S)
    if MASKED:
        m1 = c1 < SUBS
        m2 = c2 < SUBS * 2
        m4 = c4 < SUBS * 4
    else:
        m1 = None
        m2 = None
        m4 = None
    z = 0 if MASKED else None
    if BITS == 8:
        part = (
            tl.load(codes + row * (SUBS * 8) + c4, mask=m4, other=z),
            tl.load(codes + row * (SUBS * 8) + SUBS * 4 + c4, mask=m4, other=z),
        )
    elif BITS < 4:
        part = (tl.load(codes + row * (SUBS * 2) + c2, mask=m2, other=z),)
    else:
        part = (tl.load(codes + row * (SUBS * 4) + c4, mask=m4, other=z),)
    if BITS == 6:
        part = part + (tl.load(upper + row * (SUBS * 2) + c2, mask=m2, other=z),)
    if BITS == 3 or BITS == 5:
        part = part + (tl.load(upper + row * SUBS + c1, mask=m1, other=z),)
    part = part + (tl.load(scales + row * SUBS + c1, mask=m1, other=z),)
    if SCALE == SUPER:
        place = tl.max_contiguous(row * (SUBS // 8) + c1 // 8, S)
        part = part + (tl.load(supers + place, mask=m1, other=z),)
    return part


@triton.jit
def table_value(code, TABLE: tl.constexpr):
    """The value of each code of 4 bits, by arithmetic."""
    w0: tl.constexpr = _IQ4_WORDS[0] if TABLE == 1 else _E2M1_WORDS[0]
    w1: tl.constexpr = _IQ4_WORDS[1] if TABLE == 1 else _E2M1_WORDS[1]
    w2: tl.constexpr = _IQ4_WORDS[2] if TABLE == 1 else _E2M1_WORDS[2]
    w3: tl.constexpr = _IQ4_WORDS[3] if TABLE == 1 else _E2M1_WORDS[3]
    word = tl.where(code < 8, tl.where(code < 4, w0, w1), tl.where(code < 12, w2, w3))
    return (word << (24 - 8 * (code & 3))) >> 24


@triton.jit
def look_up(word, TABLE: tl.constexpr, EMU: tl.constexpr):
    """The values of a word's low nibbles and of its high ones, four signed bytes each."""
    if EMU:
        up = 8 * tl.arange(0, 4)[None, :]
        low = (word[:, None] >> up) & 15
        high = (word[:, None] >> (up + 4)) & 15
        a = table_value(low, TABLE) & 255
        b = table_value(high, TABLE) & 255
        return tl.sum(a << up, 1), tl.sum(b << up, 1)
    else:
        return tl.inline_asm_elementwise(
            _LOOK_UP_IQ4 if TABLE == 1 else _LOOK_UP_E2M1,
            "=&r,=&r,r",
            [word],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def spell(part, S: tl.constexpr, FORM: tl.constexpr, EMU: tl.constexpr):
    """The eight words of each sub-block's codes: low halves, high halves.

    Bare 4-bit codes of the high halves stay where they are, 16 times too large: `dots` corrects
    sums, which is cheaper.
    """
    BITS: tl.constexpr = FORM[0]
    TABLE: tl.constexpr = FORM[2]
    low = ()
    high = ()
    if BITS == 8:
        low = quarters(part[0], S)
        high = quarters(part[1], S)
    elif BITS < 4:
        u, v = tl.split(tl.reshape(part[0], [S, 2]))
        for j in tl.static_range(4):
            a = (u >> (2 * j)) & 0x03030303
            b = (v >> (2 * j)) & 0x03030303
            if BITS == 3:
                a |= ((part[1] >> j) & 0x01010101) << 2
                b |= ((part[1] >> (4 + j)) & 0x01010101) << 2
            low = low + (a,)
            high = high + (b,)
    else:
        words = quarters(part[0], S)
        if BITS == 6:
            u, v = tl.split(tl.reshape(part[1], [S, 2]))
        for j in tl.static_range(4):
            if TABLE > 0:
                a, b = look_up(words[j], TABLE, EMU)
            else:
                a = words[j] & 0x0F0F0F0F
                if BITS == 4:
                    b = words[j] & -252645136  # 0xF0F0F0F0
                else:
                    b = (words[j] >> 4) & 0x0F0F0F0F
            if BITS == 5:
                a |= ((part[1] >> j) & 0x01010101) << 4
                b |= ((part[1] >> (4 + j)) & 0x01010101) << 4
            if BITS == 6:
                a |= ((u >> (2 * j)) & 0x03030303) << 4
                b |= ((v >> (2 * j)) & 0x03030303) << 4
            low = low + (a,)
            high = high + (b,)
    return low + high


@triton.jit
def _eight(words):
    """Eight words [S] as one [S, half, 2, 2, 1], for the emulation."""
    low = tl.join(tl.join(words[0], words[1]), tl.join(words[2], words[3]))
    high = tl.join(tl.join(words[4], words[5]), tl.join(words[6], words[7]))
    return tl.permute(tl.join(low, high), [0, 3, 1, 2])[:, :, :, :, None]


@triton.jit
def dots(c, x, FORM: tl.constexpr, EMU: tl.constexpr):
    """Sums of codes by activations over the low and the high half of each sub-block."""
    BITS: tl.constexpr = FORM[0]
    TABLE: tl.constexpr = FORM[2]
    SIGNED: tl.constexpr = BITS == 8 or TABLE > 0
    if EMU:
        up = 8 * tl.arange(0, 4)[None, None, None, None, :]
        a = _eight(c) >> up
        if SIGNED:
            a = (a << 24) >> 24
        else:
            a &= 255
        products = a * (((_eight(x) >> up) << 24) >> 24)
        low, high = tl.split(tl.sum(tl.sum(tl.sum(products, 4), 3), 2))
    else:
        low, high = tl.inline_asm_elementwise(
            _DOTS_SIGNED if SIGNED else _DOTS_UNSIGNED,
            _DOTS_CONSTRAINTS,
            [c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]
            + [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    if BITS == 4 and TABLE == 0:
        high = high >> 4
    return low, high


@triton.jit
def first_half(word):
    """The low 16 bits as float16, widened."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def second_half(word):
    """The high 16 bits as float16, widened."""
    return ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def power(exponent):
    """Half of the power of 2 that an e8m0 scale means; the two smallest are subnormal."""
    bits = tl.where(exponent < 2, 0x00200000 << (exponent & 1), (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def group_scales(scale, super_, FORM: tl.constexpr):
    """Scales and minimums of the low and the high halves, float32: `scale * code - minimum`."""
    GROUP: tl.constexpr = FORM[3]
    MINIMUM: tl.constexpr = FORM[4]
    SCALE: tl.constexpr = FORM[5]
    if SCALE == EXPONENT:
        a = power(scale.to(tl.int32))
        return a, a, a * 0, a * 0
    elif SCALE == FLOAT16:
        if MINIMUM:
            a = first_half(scale)
            m = -second_half(scale)
            return a, a, m, m
        else:
            a = scale.to(tl.float32)
            return a, a, a * 0, a * 0
    else:
        s = scale.to(tl.int32)
        if MINIMUM:
            a = first_half(super_)
            m = second_half(super_)
            if GROUP == 16:
                return (
                    a * (s & 255).to(tl.float32),
                    a * ((s >> 8) & 255).to(tl.float32),
                    m * ((s >> 16) & 255).to(tl.float32),
                    m * ((s >> 24) & 255).to(tl.float32),
                )
            else:
                a = a * (s & 255).to(tl.float32)
                m = m * ((s >> 8) & 255).to(tl.float32)
                return a, a, m, m
        else:
            a = super_.to(tl.float32)
            if GROUP == 16:
                low = a * ((s << 24) >> 24).to(tl.float32)
                return low, a * (s >> 8).to(tl.float32), a * 0, a * 0
            else:
                a = a * s.to(tl.float32)
                return a, a, a * 0, a * 0
