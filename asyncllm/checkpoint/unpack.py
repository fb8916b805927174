"""How each block format becomes float32, in torch.

Every decoder here takes `blocks`, uint8 `[n, block_bytes]`, contiguous, fills `out`, float32
`[n, block_elements]`, contiguous, and takes its larger temporaries from a `Scratch`. The results
have the bits of `gguf.quants.dequantize`. Works on any torch device.

What makes them quick: operations over whole contiguous buffers run several times faster than those
over short strided runs, so bytes are masked and shifted before they are cut out of their blocks,
and small fields are handled eight at a time inside 64-bit words. Products of an fp16 scale, a 6-bit
scale and a 5-bit weight fit float32 exactly; only the last sum rounds.

The layouts are those of `ggml-common.h` and `ggml-quants.c` of the ggml project.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from asyncllm.checkpoint.formats import Format

# Weights unpacked at a time on the CPU: temporaries stay in the caches, calls stay few.
TILE_WEIGHTS: Final = 1 << 20

# The same byte eight times, as the signed 64-bit integer torch wants.
_EVERY_BYTE: Final = 0x0101010101010101
# Byte i keeps bit i: what turns eight copies of a byte into its eight bits.
_DIAGONAL: Final = int.from_bytes(bytes(1 << i for i in range(8)), "little", signed=True)

# Views of working memory kept for the next tile of the same size.
_VIEWS_KEPT: Final = 256

_IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Scratch:
    """Working memory for the temporaries of one tile, carved from one buffer and used again.

    Fresh pages cost more than the arithmetic done in them (a page fault each 4 KiB), so on the CPU
    the buffer stays; its size is bounded by the tile. Other devices have caching allocators.
    """

    def __init__(self) -> None:
        self._words = torch.empty(0, dtype=torch.int64, device="cpu")
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}
        self._used_words = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._words.nbytes

    def reset(self) -> None:
        """Everything handed out so far may be handed out again."""
        self._used_words = 0

    def empty(self, like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor on the device of `like`."""
        if like.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=like.device)
        start, count = self._used_words, math.prod(shape)
        # Whole cache lines, so that no tensor begins in the middle of one.
        words = -(-count * dtype.itemsize // 64) * 8
        self._used_words += words
        # The same shapes come again and again; making a view costs as much as a small operation.
        place = (start, dtype, shape)
        view = self._views.get(place)
        if view is None:
            view = self._views[place] = self._view(start, words, dtype)[:count].view(shape)
        return view

    def _view(self, start: int, words: int, dtype: torch.dtype) -> Tensor:
        # Outliving the caller's inference mode, it must be no inference tensor.
        with torch.inference_mode(False):
            if len(self._views) >= _VIEWS_KEPT or start + words > self._words.numel():
                self._views.clear()
            if start + words > self._words.numel():
                self._words = torch.empty(start + words, dtype=torch.int64, device="cpu")
            return self._words[start : start + words].view(dtype)

    def copy(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """`source` as `dtype`, contiguous."""
        return self.empty(source, dtype, *source.shape).copy_(source)

    def nibbles(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The low and the high four bits of every byte."""
        low, high = (self.empty(packed, packed.dtype, *packed.shape) for _ in range(2))
        torch.bitwise_and(packed, 15, out=low)
        torch.bitwise_right_shift(packed, 4, out=high)
        return low, high

    def widened_nibbles(self, packed: Tensor, offset: int = 0) -> Iterator[tuple[int, Tensor]]:
        """First (0, the low four bits of every byte less `offset`), then (1, the high ones).

        Both are float32 of the shape of `packed`, one after the other in the same memory.
        """
        quants = self.empty(packed, packed.dtype, *packed.shape)
        widened = self.empty(packed, torch.float32, *packed.shape)
        for half in range(2):
            if half == 0:
                torch.bitwise_and(packed, 15, out=quants)
            else:
                torch.bitwise_right_shift(packed, 4, out=quants)
            yield half, widened.copy_(_signed(quants.sub_(offset)) if offset else quants)


Decoder = Callable[[Tensor, Tensor, Scratch], None]


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


_per_thread = _PerThread()


def unpack_rows(layout: Format, raw: Tensor, out: Tensor) -> None:
    """`Format.unpack`: checks the arguments and runs the format's decoder over tiles of blocks."""
    rows, columns = out.shape if out.dim() == 2 else (-1, -1)
    if (
        (raw.dtype, out.dtype) != (torch.uint8, torch.float32)
        or rows < 0
        or tuple(raw.shape) != (rows, layout.row_bytes(columns))
        or raw.device != out.device
        or not (raw.is_contiguous() and out.is_contiguous())
    ):
        raise ValueError(
            f"unpacking {layout.name} takes contiguous uint8 [rows, row bytes] and float32 "
            f"[rows, columns] on one device, not {raw.dtype} {list(raw.shape)} on {raw.device} "
            f"and {out.dtype} {list(out.shape)} on {out.device}"
        )
    if out.numel() == 0:
        return
    decoder = DECODERS.get(layout.name)
    # Plain floats have blocks of one; any run of them will do as a block here.
    width = columns if layout.block_elements == 1 else layout.block_elements
    blocks, out = raw.view(-1, layout.row_bytes(width)), out.view(-1, width)
    step = len(blocks)
    if out.device.type == "cpu":
        step = max(1, TILE_WEIGHTS // width)
    scratch = _per_thread.scratch
    for start in range(0, len(blocks), step):
        scratch.reset()
        if decoder is None:
            _through_gguf(layout, blocks[start : start + step], out[start : start + step])
        else:
            decoder(blocks[start : start + step], out[start : start + step], scratch)


def unpacks_paired(layout: Format, device: torch.device) -> bool:
    """Whether `unpack_paired` serves a format on a device."""
    # An operator of torch for another purpose: a later torch may drop it.
    return (
        layout.name == "Q4_1"
        and device.type == "cpu"
        and hasattr(torch.ops.quantized, "embedding_bag_4bit_unpack")
    )


def unpack_paired(raw: Tensor, columns: int) -> Tensor:
    """Q4_1 rows as float32 `[rows, columns]`, new, columns as in `paired_columns`.

    The bytes of a block hold weights i and i + 16. Leaving those side by side saves what costs most
    of `_q4_1`, many short runs, for torch then has one operator that does all: it takes 4-bit rows
    for embeddings, each followed by its fp16 scale and minimum. Here each block is such a row. The
    weights have the bits of `Format.unpack`.
    """
    scratch = _per_thread.scratch
    scratch.reset()
    words = raw.view(-1).view(torch.int32)
    moved = scratch.empty(raw, torch.int32, words.numel() // 5, 5)
    # A block begins with its scales; they move to its end.
    moved.view(-1)[:-1].copy_(words[1:])
    moved[:, 4].copy_(words.view(-1, 5)[:, 0])
    blocks: Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(moved.view(torch.uint8))
    return blocks.view(-1, columns)


def paired_columns(x: Tensor) -> Tensor:
    """A copy of `[rows, columns]`, of each 32 columns in the order 0, 16, 1, 17, and so on."""
    return x.index_select(1, _paired_order(x.shape[1]))


@lru_cache(maxsize=16)
def _paired_order(columns: int) -> Tensor:
    # Kept beyond the caller's inference mode, it must be no inference tensor.
    with torch.inference_mode(False):
        return torch.arange(columns, device="cpu").view(-1, 2, 16).transpose(1, 2).flatten()


def _through_gguf(layout: Format, blocks: Tensor, out: Tensor) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # Scales of a damaged file may be infinite or no numbers; what they make is what they make.
    with np.errstate(all="ignore"):
        values = dequantize(blocks.cpu().numpy(), GGMLQuantizationType(layout.type_id))
    out.copy_(torch.from_numpy(values).view(out.shape))


def _field(blocks: Tensor, start: int, stop: int, scratch: Scratch) -> Tensor:
    """The bytes `start` to `stop` of every block, uint8 `[n, stop - start]`, contiguous."""
    return scratch.copy(blocks[:, start:stop], torch.uint8)


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """One or two fp16 numbers that begin at byte `start`, as float32 `[n, count]`."""
    # As one word to a block: a run of one element is no loop within a loop.
    word = torch.int16 if count == 1 else torch.int32
    place = start // word.itemsize
    return blocks.view(word)[:, place : place + 1].contiguous().view(torch.float16).float()


def _signed(values: Tensor) -> Tensor:
    return values.view(torch.int8)


def _sixteens(packed: Tensor, scratch: Scratch) -> Tensor:
    """The bits of uint8 `[n, k]`, lowest first, as 0 and 16 in uint8 `[n, 8 * k]`."""
    spread = scratch.copy(packed, torch.int64).mul_(_EVERY_BYTE).bitwise_and_(_DIAGONAL)
    # Byte i is 0 or 1 << i. Adding 127 sets its highest bit where it is not 0, and carries nowhere.
    spread.add_(127 * _EVERY_BYTE).bitwise_right_shift_(3).bitwise_and_(16 * _EVERY_BYTE)
    return spread.view(torch.uint8)


@lru_cache(maxsize=16)
def _codebook(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 `[65536]`: the int8 values of four 4-bit codes, the lowest code first, at once."""
    # Kept beyond the caller's inference mode, it must be no inference tensor.
    with torch.inference_mode(False):
        places = torch.tensor([0, 4, 8, 12], device=device)
        codes = torch.arange(1 << 16, device=device).unsqueeze(1) >> places & 15
        words = torch.tensor(values, dtype=torch.int8, device=device)[codes]
        return words.view(torch.int32).view(-1)


def _look_up(packed: Tensor, values: tuple[int, ...], scratch: Scratch) -> Tensor:
    """int8 `[n, 32]`: the values of uint8 `[n, 16]`, the low halves of the bytes first."""
    words = packed.view(torch.int32)
    index = scratch.empty(packed, torch.int32, len(words), 2, 4)
    pairs, rest = (scratch.empty(packed, torch.int32, len(words), 4) for _ in range(2))
    for half in range(2):
        torch.bitwise_right_shift(words, 4 * half, out=pairs).bitwise_and_(0x0F0F0F0F)
        # Four codes move together: bytes 0a 0b 0c 0d become the 16-bit number abcd.
        pairs.bitwise_or_(torch.bitwise_right_shift(pairs, 4, out=rest))
        torch.bitwise_right_shift(pairs, 8, out=rest).bitwise_and_(0xFF00)
        index[:, half] = pairs.bitwise_and_(0xFF).bitwise_or_(rest)
    found = scratch.empty(packed, torch.int32, index.numel())
    torch.index_select(_codebook(values, packed.device), 0, index.view(-1), out=found)
    return found.view(torch.int8).view(-1, 32)


def _f32(blocks: Tensor, out: Tensor, _: Scratch) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: Tensor, out: Tensor, _: Scratch) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor, _: Scratch) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q4_0(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    scale, halves = _halves(blocks, 0), out.view(-1, 2, 16)
    for half, quants in scratch.widened_nibbles(blocks, 8):
        torch.mul(quants[:, 2:], scale, out=halves[:, half])


def _q4_1(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    scales, halves = _halves(blocks, 0, 2), out.view(-1, 2, 16)
    for half, quants in scratch.widened_nibbles(blocks):
        torch.mul(quants[:, 4:], scales[:, :1], out=halves[:, half])
    out.add_(scales[:, 1:])


def _q5(blocks: Tensor, out: Tensor, high: int, offset: int, scratch: Scratch) -> None:
    """`out = q - offset`: four bytes of fifth bits begin at `high`, the nibbles follow them."""
    fifth = _sixteens(blocks[:, high : high + 4], scratch)
    out.copy_(_signed(fifth.sub_(offset)) if offset else fifth)
    halves = out.view(-1, 2, 16)
    for half, quants in scratch.widened_nibbles(blocks):
        halves[:, half].add_(quants[:, high + 4 :])


def _q5_0(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    _q5(blocks, out, 2, 16, scratch)
    out.mul_(_halves(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    _q5(blocks, out, 4, 0, scratch)
    scales = _halves(blocks, 0, 2)
    out.mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    widened = scratch.copy(_signed(blocks), torch.float32)
    torch.mul(widened[:, 2:], _halves(blocks, 0), out=out)


def _two_bits(packed: Tensor, scratch: Scratch) -> Tensor:
    """uint8 `[n, 256]` from `[n, 64]`: of each 32 bytes all lowest two bits, then the next."""
    words = packed.view(torch.int64)
    fields = scratch.empty(packed, torch.int64, len(packed), 2, 4, 4)
    shifted = scratch.empty(packed, torch.int64, len(packed), 8)
    for place in range(4):
        torch.bitwise_right_shift(words, 2 * place, out=shifted).bitwise_and_(3 * _EVERY_BYTE)
        fields[:, :, place] = shifted.view(-1, 2, 4)
    return fields.view(torch.uint8).view(-1, 256)


def _q2_k(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    scales, halves = _field(blocks, 0, 16, scratch), _halves(blocks, 80, 2)
    groups = out.view(-1, 16, 16)
    out.copy_(_two_bits(_field(blocks, 16, 80, scratch), scratch))
    groups.mul_((halves[:, :1] * (scales & 15)).unsqueeze(2))
    groups.sub_((halves[:, 1:] * (scales >> 4)).unsqueeze(2))


def _q3_k(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = torch.cat((low & 15, low >> 4), dim=1)
    upper = torch.cat([(high >> place) & 3 for place in (0, 2, 4, 6)], dim=1)
    scales = _signed(scales.bitwise_or_(upper << 4).sub_(32))
    quants = _two_bits(_field(blocks, 32, 96, scratch), scratch)
    groups = quants.view(torch.int64).view(-1, 8, 4)
    third = _field(blocks, 0, 32, scratch).view(torch.int64)
    moved = scratch.empty(blocks, torch.int64, len(blocks), 4)
    for group in range(8):
        # Bit `group` of every byte comes to place 2.
        if group < 2:
            torch.bitwise_left_shift(third, 2 - group, out=moved)
        else:
            torch.bitwise_right_shift(third, group - 2, out=moved)
        groups[:, group].bitwise_or_(moved.bitwise_and_(4 * _EVERY_BYTE))
    out.copy_(_signed(quants.sub_(4)))
    out.view(-1, 16, 16).mul_((_halves(blocks, 108) * scales).unsqueeze(2))


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


def _q4_k(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    scales, minimums = _k_scales(blocks)
    packed = _field(blocks, 16, 144, scratch).view(-1, 32)
    pairs = out.view(-1, 2, 32)
    for half, quants in scratch.widened_nibbles(packed):
        torch.mul(quants, scales.view(-1, 2)[:, half, None], out=pairs[:, half])
    out.view(-1, 32).sub_(minimums.view(-1, 1))


def _q5_k(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    scales, minimums = _k_scales(blocks)
    low, high = scratch.nibbles(_field(blocks, 48, 176, scratch))
    fifth = _field(blocks, 16, 48, scratch).view(torch.int64)
    # Pair p of groups takes bits 2p and 2p + 1 of the 32 bytes; here they come to places 0 and 1.
    pairs = scratch.empty(blocks, torch.int64, len(blocks), 4, 4)
    for pair in range(4):
        torch.bitwise_right_shift(fifth, 2 * pair, out=pairs[:, pair])
    bits = pairs.view(torch.uint8).view(-1, 128)
    moved = scratch.empty(blocks, torch.uint8, len(blocks), 128)
    low.bitwise_or_(torch.bitwise_left_shift(bits, 4, out=moved).bitwise_and_(16))
    high.bitwise_or_(torch.bitwise_left_shift(bits, 3, out=moved).bitwise_and_(16))
    halves = out.view(-1, 2, 32)
    widened = scratch.empty(blocks, torch.float32, len(blocks), 128)
    for half, quants in enumerate((low, high)):
        widened.copy_(quants)
        torch.mul(widened.view(-1, 32), scales.view(-1, 2)[:, half, None], out=halves[:, half])
    out.view(-1, 32).sub_(minimums.view(-1, 1))


def _q6_k(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    low, high = scratch.nibbles(_field(blocks, 0, 128, scratch))
    # Bits 0-1, 2-3, 4-5, 6-7 belong to groups 0 to 3: with a copy shifted by two beside it, the
    # low nibbles (groups 0 and 1) and the high ones (2 and 3) find theirs in the same places.
    bits = scratch.empty(blocks, torch.uint8, len(blocks), 2, 2, 32)
    bits[:, 0, 0], bits[:, 1, 0] = blocks[:, 128:160], blocks[:, 160:192]
    torch.bitwise_right_shift(bits[:, :, 0], 2, out=bits[:, :, 1])
    bits = bits.view(-1, 128)
    moved = scratch.empty(blocks, torch.uint8, len(blocks), 128)
    low.bitwise_or_(torch.bitwise_left_shift(bits, 4, out=moved).bitwise_and_(0x30))
    high.bitwise_or_(bits.bitwise_and_(0x30))
    quants = scratch.empty(blocks, torch.uint8, len(blocks), 2, 2, 64)
    quants[:, :, 0], quants[:, :, 1] = low.view(-1, 2, 64), high.view(-1, 2, 64)
    out.copy_(_signed(quants.sub_(32)).view(-1, 256))
    scales = _halves(blocks, 208) * _signed(blocks)[:, 192:208]
    out.view(-1, 16).mul_(scales.view(-1, 1))


def _iq4_nl(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    out.copy_(_look_up(_field(blocks, 2, 18, scratch), _IQ4_VALUES, scratch))
    out.mul_(_halves(blocks, 0))


def _iq4_xs(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    high = blocks.view(torch.int16)[:, 1:2] >> torch.arange(0, 16, 2, device=blocks.device)
    low = blocks[:, 4:8]
    low = torch.stack((low & 15, low >> 4), dim=2).view(-1, 8)
    scales = _signed(low.bitwise_or_((high & 3).to(torch.uint8) << 4).sub_(32))
    packed = _field(blocks, 8, 136, scratch).view(-1, 16)
    out.view(-1, 32).copy_(_look_up(packed, _IQ4_VALUES, scratch))
    out.view(-1, 32).mul_((_halves(blocks, 0) * scales).view(-1, 1))


def _mxfp4(blocks: Tensor, out: Tensor, scratch: Scratch) -> None:
    exponent = blocks[:, :1].int()
    # 2 ** (exponent - 128), the half of e8m0 since the values are doubled; 0 and 1 are subnormal.
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    out.copy_(_look_up(_field(blocks, 1, 17, scratch), _E2M1_VALUES, scratch))
    out.mul_(bits.view(torch.float32))


DECODERS: Final[Mapping[str, Decoder]] = {
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
