"""How each block format becomes float32, in torch.

Every function here takes `blocks`, uint8 `[n, block_bytes]`, contiguous, and fills `out`, float32
`[n, block_elements]`, contiguous. The results have the bits of `gguf.quants.dequantize`.

What makes them quick, measured on AVX2: operations over whole contiguous buffers run five to twenty
times faster than those over short strided runs, so integers are masked and shifted before they are
cut out of their blocks, and small fields are handled eight at a time inside 64-bit words. Products
of an fp16 scale, a 6-bit scale and a 5-bit weight fit float32 exactly; only the last sum rounds.

The layouts are those of `ggml-common.h` and `ggml-quants.c` of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

Decoder = Callable[[Tensor, Tensor], None]

# The same byte eight times, as the signed 64-bit integer torch wants.
_EVERY_BYTE: Final = 0x0101010101010101
# Byte i keeps bit i: what turns eight copies of a byte into its eight bits.
_DIAGONAL: Final = int.from_bytes(bytes(1 << i for i in range(8)), "little", signed=True)

_IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _field(blocks: Tensor, start: int, stop: int) -> Tensor:
    """The bytes `start` to `stop` of every block, uint8 `[n, stop - start]`, contiguous."""
    return blocks[:, start:stop].contiguous()


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """`count` fp16 numbers that begin at byte `start`, as float32 `[n, count]`."""
    return _field(blocks, start, start + 2 * count).view(torch.float16).float()


def _signed(bytes_: Tensor) -> Tensor:
    return bytes_.view(torch.int8)


def _bits(packed: Tensor) -> Tensor:
    """The bits of uint8 `[n, k]`, lowest first, as 0 and 1 in uint8 `[n, 8 * k]`."""
    spread = (packed.long() * _EVERY_BYTE).bitwise_and_(_DIAGONAL)
    return spread.view(torch.uint8).ne(0).view(torch.uint8)


def _codebook_words(values: tuple[int, ...]) -> bytes:
    """Four 4-bit codes (lowest first, a 16-bit index) to their four int8 values."""
    import numpy as np

    codes = np.arange(1 << 16, dtype=np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15
    return np.array(values, np.int8)[codes].tobytes()


@lru_cache(maxsize=16)
def _codebook(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 `[65536]`: the int8 values of four 4-bit codes at once."""
    words = bytearray(_codebook_words(values))
    return torch.frombuffer(words, dtype=torch.int32).to(device)


def _look_up(packed: Tensor, values: tuple[int, ...]) -> Tensor:
    """int8 `[n, 32]`: the values of uint8 `[n, 16]`, the low halves of the bytes first."""
    words = packed.view(torch.int32)
    index = torch.empty((words.shape[0], 2, 4), dtype=torch.int32, device=packed.device)
    for half, nibbles in enumerate((words & 0x0F0F0F0F, (words >> 4).bitwise_and_(0x0F0F0F0F))):
        pairs = nibbles.bitwise_or_(nibbles >> 4)
        index[:, half] = (pairs & 0xFF).bitwise_or_((pairs >> 8).bitwise_and_(0xFF00))
    found = torch.index_select(_codebook(values, packed.device), 0, index.view(-1))
    return found.view(torch.int8).view(-1, 32)


def _nibbles_into(out: Tensor, blocks: Tensor, start: int, scale: Tensor) -> None:
    """`out [n, g, 2, w] = nibble * scale [n, g, 2, 1]`; `g * w` packed bytes begin at `start`.

    The low halves of a group's `w` bytes come first, then the high halves.
    """
    groups, width = out.shape[1], out.shape[3]
    for half, nibbles in enumerate((blocks & 15, blocks >> 4)):
        widened = nibbles.float()[:, start : start + groups * width].unflatten(1, (groups, width))
        torch.mul(widened, scale[:, :, half], out=out[:, :, half])


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    scale, halves = _halves(blocks, 0), out.view(-1, 2, 16)
    for half, nibbles in enumerate((blocks & 15, blocks >> 4)):
        centred = _signed(nibbles.sub_(8)).float()
        torch.mul(centred[:, 2:], scale, out=halves[:, half])


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    scales = _halves(blocks, 0, 2)
    _nibbles_into(out.view(-1, 1, 2, 16), blocks, 4, scales[:, :1, None, None].expand(-1, 1, 2, 1))
    out.add_(scales[:, 1:])


def _q5(blocks: Tensor, out: Tensor, high: int, offset: int) -> None:
    """`out = q - offset`: four bytes of fifth bits begin at `high`, the nibbles follow them."""
    fifth = _bits(_field(blocks, high, high + 4)).mul_(16).sub_(offset)
    out.copy_(_signed(fifth))
    halves = out.view(-1, 2, 16)
    for half, nibbles in enumerate((blocks & 15, blocks >> 4)):
        halves[:, half].add_(nibbles.float()[:, high + 4 :])


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _q5(blocks, out, 2, 16)
    out.mul_(_halves(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _q5(blocks, out, 4, 0)
    scales = _halves(blocks, 0, 2)
    out.mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    torch.mul(_signed(blocks).float()[:, 2:], _halves(blocks, 0), out=out)


def _two_bits(packed: Tensor) -> Tensor:
    """uint8 `[n, 256]` from uint8 `[n, 64]`: of each 32 bytes first the lowest two bits, and so on."""
    words = packed.view(torch.int64).view(-1, 2, 4)
    fields = torch.empty((words.shape[0], 2, 4, 4), dtype=torch.int64, device=packed.device)
    for place in range(4):
        fields[:, :, place] = (words >> 2 * place).bitwise_and_(3 * _EVERY_BYTE)
    return fields.view(torch.uint8).view(-1, 256)


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scales, halves = _field(blocks, 0, 16), _halves(blocks, 80, 2)
    groups = out.view(-1, 16, 16)
    out.copy_(_two_bits(_field(blocks, 16, 80)))
    groups.mul_((halves[:, :1] * (scales & 15)).unsqueeze(2))
    groups.sub_((halves[:, 1:] * (scales >> 4)).unsqueeze(2))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    low, high = _field(blocks, 96, 104), _field(blocks, 104, 108).view(torch.int32)
    scales = torch.cat((low & 15, low >> 4), dim=1)
    upper = torch.cat([(high >> 2 * place) & 0x03030303 for place in range(4)], dim=1)
    scales = scales.bitwise_or_(upper.view(torch.uint8) << 4).sub_(32)
    quants = _two_bits(_field(blocks, 32, 96))
    third = _field(blocks, 0, 32).view(torch.int64)
    words = quants.view(torch.int64).view(-1, 8, 4)
    for place in range(8):
        bits = (third << 2) >> place if place <= 2 else third >> place - 2
        words[:, place].bitwise_or_(bits.bitwise_and_(4 * _EVERY_BYTE))
    out.copy_(_signed(quants.sub_(4)))
    out.view(-1, 16, 16).mul_((_halves(blocks, 108) * _signed(scales)).unsqueeze(2))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of Q4_K and Q5_K, float32 `[n, 8]` each, times their super-scales."""
    halves = _halves(blocks, 0, 2)
    first, second, third = blocks.view(torch.int32)[:, 1:4].t().contiguous()
    # Three words hold 16 numbers of 6 bits; each expression makes four of them, one to a byte.
    scales = (first & 0x3F3F3F3F, (third & 0x0F0F0F0F) | ((first >> 2) & 0x30303030))
    minimums = (second & 0x3F3F3F3F, ((third >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030))
    return (
        halves[:, :1] * torch.stack(scales, dim=1).view(torch.uint8),
        halves[:, 1:] * torch.stack(minimums, dim=1).view(torch.uint8),
    )


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minimums = _k_scales(blocks)
    _nibbles_into(out.view(-1, 4, 2, 32), blocks, 16, scales.view(-1, 4, 2, 1))
    out.view(-1, 8, 32).sub_(minimums.unsqueeze(2))


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minimums = _k_scales(blocks)
    quants = _field(blocks, 48, 176).view(torch.int64).view(-1, 4, 4)
    fifth = _field(blocks, 16, 48).view(torch.int64).view(-1, 1, 4)
    whole = torch.empty((len(blocks), 4, 2, 4), dtype=torch.int64, device=blocks.device)
    # Pair p of groups takes bits 2p and 2p + 1 of the 32 bytes; here they come to places 0 and 1.
    places = torch.arange(0, 8, 2, device=blocks.device).view(4, 1)
    bits = fifth >> places
    mask, bit = 15 * _EVERY_BYTE, 16 * _EVERY_BYTE
    whole[:, :, 0] = (quants & mask).bitwise_or_((bits << 4).bitwise_and_(bit))
    whole[:, :, 1] = (quants >> 4).bitwise_and_(mask).bitwise_or_((bits << 3).bitwise_and_(bit))
    out.copy_(whole.view(torch.uint8).view(-1, 256))
    groups = out.view(-1, 8, 32)
    groups.mul_(scales.unsqueeze(2)).sub_(minimums.unsqueeze(2))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = _field(blocks, 0, 128)
    high = _field(blocks, 128, 192).view(-1, 2, 1, 32)
    # Bits 0-1, 2-3, 4-5, 6-7 belong to groups 0 to 3: with a copy shifted by two beside it, the
    # low nibbles (groups 0 and 1) and the high ones (2 and 3) find theirs in the same places.
    high = torch.cat((high, high >> 2), dim=2).view(-1, 128)
    quants = torch.empty((len(blocks), 2, 2, 64), dtype=torch.uint8, device=blocks.device)
    first = (low & 15).bitwise_or_((high << 4).bitwise_and_(0x30))
    second = (low >> 4).bitwise_or_(high.bitwise_and_(0x30))
    quants[:, :, 0] = first.view(-1, 2, 64)
    quants[:, :, 1] = second.view(-1, 2, 64)
    out.copy_(_signed(quants.sub_(32)).view(-1, 256))
    scales = _halves(blocks, 208) * _signed(_field(blocks, 192, 208))
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_look_up(_field(blocks, 2, 18), _IQ4_VALUES))
    out.mul_(_halves(blocks, 0))


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    high = blocks.view(torch.int16)[:, 1:2] >> torch.arange(0, 16, 2, device=blocks.device)
    low = _field(blocks, 4, 8)
    low = torch.stack((low & 15, low >> 4), dim=2).view(-1, 8)
    scales = _signed(low.bitwise_or_((high & 3).to(torch.uint8) << 4).sub_(32))
    out.view(-1, 32).copy_(_look_up(_field(blocks, 8, 136).view(-1, 16), _IQ4_VALUES))
    out.view(-1, 8, 32).mul_((_halves(blocks, 0) * scales).unsqueeze(2))


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    exponent = blocks[:, :1].int()
    # 2 ** (exponent - 128), the half of e8m0 since the values are doubled; 0 and 1 are subnormal.
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    out.copy_(_look_up(_field(blocks, 1, 17), _E2M1_VALUES))
    out.mul_(bits.view(torch.float32))


DECODERS: Mapping[str, Decoder] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
