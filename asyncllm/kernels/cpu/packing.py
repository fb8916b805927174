"""From a checkpoint's rows to tiles: the same bits in another order, once at load.

For each block format one function spells a block's codes out, a byte each, and one puts its scales
where tiles have them (`tiles.py`). The layouts of blocks are those of `ggml-common.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np

from asyncllm.kernels.cpu.compiled import KernelLibrary
from asyncllm.kernels.cpu.memory import load_i32, load_i64, load_u8, store_i32, store_u8
from asyncllm.kernels.cpu.step import WORD
from asyncllm.kernels.cpu.tiles import CHUNK, FLOATS, LAYOUTS, TILE_ROWS, tile_bytes

if TYPE_CHECKING:
    from asyncllm.checkpoint.formats import Format

_njit = numba.njit(nogil=True)


@_njit
def _halves(source: int, codes: int) -> None:
    """16 bytes: the low four bits of each, then the high ones."""
    for i in range(16):
        byte = load_u8(source + i)
        store_u8(codes + i, byte & 15)
        store_u8(codes + 16 + i, byte >> 4)


@_njit
def _copy(source: int, target: int, count: int) -> None:
    for i in range(count):
        store_u8(target + i, load_u8(source + i))


def _four(at: int) -> Callable[[int, int], None]:
    @_njit
    def codes(block: int, codes: int) -> None:
        _halves(block + at, codes)

    return codes


def _five(high: int) -> Callable[[int, int], None]:
    @_njit
    def codes(block: int, codes: int) -> None:
        _halves(block + high + 4, codes)
        for i in range(32):
            bit = load_u8(block + high + i // 8) >> (i % 8) & 1
            store_u8(codes + i, load_u8(codes + i) | bit << 4)

    return codes


@_njit
def _q8_0(block: int, codes: int) -> None:
    for i in range(32):
        store_u8(codes + i, load_u8(block + 2 + i) ^ 128)


@_njit
def _two_bits(source: int, codes: int) -> None:
    for i in range(256):
        byte = load_u8(source + i // 128 * 32 + i % 32)
        store_u8(codes + i, byte >> (2 * (i // 32 % 4)) & 3)


@_njit
def _q2_k(block: int, codes: int) -> None:
    _two_bits(block + 16, codes)


@_njit
def _q3_k(block: int, codes: int) -> None:
    _two_bits(block + 32, codes)
    for i in range(256):
        bit = load_u8(block + i % 32) >> (i // 32) & 1
        store_u8(codes + i, load_u8(codes + i) | bit << 2)


@_njit
def _four_k(source: int, codes: int) -> None:
    """128 bytes: of each 32 first the low four bits, then the high ones."""
    for i in range(128):
        byte = load_u8(source + i)
        place = codes + i // 32 * 64 + i % 32
        store_u8(place, byte & 15)
        store_u8(place + 32, byte >> 4)


@_njit
def _q4_k(block: int, codes: int) -> None:
    _four_k(block + 16, codes)


@_njit
def _q5_k(block: int, codes: int) -> None:
    _four_k(block + 48, codes)
    for i in range(256):
        bit = load_u8(block + 16 + i % 32) >> (i // 32) & 1
        store_u8(codes + i, load_u8(codes + i) | bit << 4)


@_njit
def _q6_k(block: int, codes: int) -> None:
    for i in range(256):
        half, quarter, place = i // 128, i // 32 % 4, i % 32
        low = load_u8(block + 64 * half + 32 * (quarter % 2) + place) >> (4 * (quarter // 2)) & 15
        high = load_u8(block + 128 + 32 * half + place) >> (2 * quarter) & 3
        store_u8(codes + i, low | high << 4)


@_njit
def _iq4_xs(block: int, codes: int) -> None:
    for part in range(8):
        _halves(block + 8 + 16 * part, codes + 32 * part)


# Scales. Each function is given the block, the row's number in the tile, where the tile's block
# begins, where the codes of its first chunk end, and the bytes from chunk to chunk.


def _float16_scales(count: int) -> Callable[..., None]:
    """The first `count` float16 of the block: scale, minimum."""

    @_njit
    def put(block: int, lane: int, head: int, scales: int, chunk: int) -> None:
        for index in range(count):
            _copy(block + 2 * index, scales + 32 * index + 2 * lane, 2)

    return put


@_njit
def _exponents(block: int, lane: int, head: int, scales: int, chunk: int) -> None:
    store_u8(scales + lane, load_u8(block))


@_njit
def _q2_k_scales(block: int, lane: int, head: int, scales: int, chunk: int) -> None:
    _copy(block + 80, head + 2 * lane, 2)
    _copy(block + 82, head + 32 + 2 * lane, 2)
    for i in range(16):
        byte, place = load_u8(block + i), scales + i // 2 * chunk + i % 2 * 16 + lane
        store_u8(place, byte & 15)
        store_u8(place + 32, byte >> 4)


@_njit
def _q3_k_scales(block: int, lane: int, head: int, scales: int, chunk: int) -> None:
    _copy(block + 108, head + 2 * lane, 2)
    for i in range(16):
        low = load_u8(block + 96 + i % 8) >> (4 * (i // 8)) & 15
        high = load_u8(block + 104 + i % 4) >> (2 * (i // 4)) & 3
        store_u8(scales + i // 2 * chunk + i % 2 * 16 + lane, (low | high << 4) - 32)


@_njit
def _q4_k_scales(block: int, lane: int, head: int, scales: int, chunk: int) -> None:
    _copy(block, head + 2 * lane, 2)
    _copy(block + 2, head + 32 + 2 * lane, 2)
    for i in range(8):
        if i < 4:
            scale, least = load_u8(block + 4 + i) & 63, load_u8(block + 8 + i) & 63
        else:
            mixed = load_u8(block + 8 + i)
            scale = mixed & 15 | load_u8(block + i) >> 6 << 4
            least = mixed >> 4 | load_u8(block + 4 + i) >> 6 << 4
        store_u8(scales + i * chunk + lane, scale)
        store_u8(scales + i * chunk + 16 + lane, least)


@_njit
def _q6_k_scales(block: int, lane: int, head: int, scales: int, chunk: int) -> None:
    _copy(block + 208, head + 2 * lane, 2)
    for i in range(16):
        store_u8(scales + i // 2 * chunk + i % 2 * 16 + lane, load_u8(block + 192 + i))


@_njit
def _iq4_xs_scales(block: int, lane: int, head: int, scales: int, chunk: int) -> None:
    _copy(block, head + 2 * lane, 2)
    high = load_u8(block + 2) | load_u8(block + 3) << 8
    for i in range(8):
        low = load_u8(block + 4 + i // 2) >> (4 * (i % 2)) & 15
        store_u8(scales + i * chunk + lane, (low | (high >> (2 * i) & 3) << 4) - 32)


_DECODERS: Final[dict[str, tuple[Any, Any]]] = {
    "Q4_0": (_four(2), _float16_scales(1)),
    "Q4_1": (_four(4), _float16_scales(2)),
    "Q5_0": (_five(2), _float16_scales(1)),
    "Q5_1": (_five(4), _float16_scales(2)),
    "Q8_0": (_q8_0, _float16_scales(1)),
    "Q2_K": (_q2_k, _q2_k_scales),
    "Q3_K": (_q3_k, _q3_k_scales),
    "Q4_K": (_q4_k, _q4_k_scales),
    "Q5_K": (_q5_k, _q4_k_scales),
    "Q6_K": (_q6_k, _q6_k_scales),
    "IQ4_NL": (_four(2), _float16_scales(1)),
    "IQ4_XS": (_iq4_xs, _iq4_xs_scales),
    "MXFP4": (_four(1), _exponents),
}

# The record of a packing kernel, in words.
_RAW, _ROW_BYTES, _BLOCK_BYTES, _BLOCKS, _ROWS, _OUT, _TILES, _CODES = range(8)


@_njit
def _put_planes(codes: int, out: int, bits: int) -> None:
    """32 codes of one row into the planes of a chunk; `out` is the row's place in the first."""
    if bits == 8:
        for j in range(8):
            store_i32(out + 64 * j, load_i32(codes + 4 * j))
        return
    base = 4 if bits >= 4 else 2
    if base == 4:
        for j in range(4):
            low = load_i32(codes + 4 * j) & 0x0F0F0F0F
            high = load_i32(codes + 16 + 4 * j) & 0x0F0F0F0F
            store_i32(out + 64 * j, low | high << 4)
    pairs_at = -1  # bits of a code that go to a plane of two
    if base == 2:
        pairs_at = 0
    elif bits == 6:
        pairs_at = 4
    plane = base if base == 4 else 0
    if pairs_at >= 0:
        for h in range(2):
            word = 0
            for f in range(4):
                two = load_i32(codes + 16 * h + 4 * f) >> pairs_at & 0x03030303
                word |= two << (2 * f)
            store_i32(out + 64 * (plane + h), word)
    if bits - base == 1:
        word = 0
        for j in range(8):
            word |= (load_i32(codes + 4 * j) >> base & 0x01010101) << j
        store_i32(out + 64 * base, word)


def _pack_blocks(form: str) -> Callable[[int, int, int, int], None]:
    layout = LAYOUTS[form]
    codes_of, scales_of = _DECODERS[form]
    bits, chunks = layout.bits, layout.block // CHUNK
    block_size, chunk_size = layout.block_bytes, layout.chunk_bytes
    head_size, codes_size = layout.head_bytes, layout.codes_bytes

    def kernel(p: int, _step: int, _unit: int, _thread: int) -> None:
        raw, row_bytes = load_i64(p + WORD * _RAW), load_i64(p + WORD * _ROW_BYTES)
        block_bytes, blocks = load_i64(p + WORD * _BLOCK_BYTES), load_i64(p + WORD * _BLOCKS)
        rows, out, codes = (
            load_i64(p + WORD * _ROWS),
            load_i64(p + WORD * _OUT),
            load_i64(p + WORD * _CODES),
        )
        for tile in range(load_i64(p + WORD * _TILES)):
            for number in range(blocks):
                head = out + (tile * blocks + number) * block_size
                # Rows beyond the last are left as zeros, which is what their scales are then too.
                for lane in range(min(16, rows - 16 * tile)):
                    block = raw + (16 * tile + lane) * row_bytes + number * block_bytes
                    codes_of(block, codes)
                    first = head + head_size
                    scales_of(block, lane, head, first + codes_size, chunk_size)
                    for chunk in range(chunks):
                        place = first + chunk * chunk_size + 4 * lane
                        _put_planes(codes + 32 * chunk, place, bits)

    return kernel


def _pack_floats(size: int) -> Callable[[int, int, int, int], None]:
    def kernel(p: int, _step: int, _unit: int, _thread: int) -> None:
        raw, row_bytes = load_i64(p + WORD * _RAW), load_i64(p + WORD * _ROW_BYTES)
        columns, rows = load_i64(p + WORD * _BLOCKS), load_i64(p + WORD * _ROWS)
        out = load_i64(p + WORD * _OUT)
        for tile in range(load_i64(p + WORD * _TILES)):
            for lane in range(min(16, rows - 16 * tile)):
                row = raw + (16 * tile + lane) * row_bytes
                place = out + tile * columns * 16 * size + lane * size
                for column in range(columns):
                    _copy(row + column * size, place + column * 16 * size, size)

    return kernel


def tile_form(name: str) -> str:
    """In which form of tile a format's weights are kept."""
    return name if name in LAYOUTS or name in FLOATS else "INT8"


def pack(library: KernelLibrary, layout: Format, raw: Any, columns: int, out: Any) -> None:
    """Write the tiles of a weight.

    Args:
        library: compiles.
        layout: the checkpoint's format.
        raw: uint8 [rows, row bytes], contiguous.
        columns: of the weight.
        out: uint8 [tiles, tile bytes], zeros.

    Raises:
        ValueError: a format without tiles of its own whose weights are no small integers.
    """
    form = tile_form(layout.name)
    if form == "INT8":
        _pack_integers(layout, raw, columns, out)
        return
    if form in FLOATS:
        kernel = library.address(f"pack-{form}", lambda: _pack_floats(FLOATS[form]))
        blocks, block_bytes = columns, FLOATS[form]
    else:
        kernel = library.address(f"pack-{form}", lambda: _pack_blocks(form))
        blocks, block_bytes = columns // layout.block_elements, layout.block_bytes
    codes = np.empty(256, np.uint8)
    record = np.array(
        [
            *(raw.ctypes.data, raw.shape[1], block_bytes, blocks, len(raw)),
            *(out.ctypes.data, len(out), codes.ctypes.data),
        ],
        np.int64,
    )
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel)(record.ctypes.data, 0, 0, 0)


# For formats whose weights are small integers times a scale, but none that tiles know: what the
# largest integer of 16 weights may be. Which of them it is the weights tell: the first that fits.
_LARGEST: Final = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (8, 25, 43)),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
    **dict.fromkeys(("IQ1_S", "IQ1_M"), (1, 7, 9)),
    "TQ1_0": (1,),
    "TQ2_0": (1, 2),
    "NVFP4": (1, 2, 3, 4, 6, 8, 12),
}


def _pack_integers(layout: Format, raw: Any, columns: int, out: Any) -> None:
    """Weights of a rare format as 8-bit integers, exact, with a float32 scale for each 16."""
    import torch

    step = max(TILE_ROWS, (1 << 20) // columns // TILE_ROWS * TILE_ROWS)
    for start in range(0, len(raw), step):
        part = torch.from_numpy(raw[start : start + step])
        values = torch.empty(len(part), columns)
        layout.unpack(part, values)
        groups = np.zeros((-(-len(part) // 16) * 16, columns // 16, 16), np.float32)
        groups[: len(part)] = values.numpy().reshape(len(part), -1, 16)
        integers, scales = _as_integers(layout.name, groups)
        lines = (integers + 128).astype(np.uint8).reshape(-1, 16, columns // 32, 8, 4)
        tiles = out[start // 16 : start // 16 + len(lines)].reshape(len(lines), columns // 32, -1)
        tiles[:, :, :512] = lines.transpose(0, 2, 3, 1, 4).reshape(len(lines), columns // 32, 512)
        wide = scales.reshape(-1, 16, columns // 32, 2).transpose(0, 2, 3, 1)
        tiles[:, :, 512:] = np.ascontiguousarray(wide).view(np.uint8).reshape(*wide.shape[:2], 128)


def _as_integers(name: str, groups: Any) -> tuple[Any, Any]:
    """int32 [..., 16] and float32 [...] whose product the weights are."""
    with np.errstate(all="ignore"):  # scales of a damaged file may be no numbers; nothing fits then
        peak = np.abs(groups).max(-1)
        integers = np.zeros(groups.shape, np.int32)
        scales = np.zeros(peak.shape, np.float32)
        open_ = peak != 0
        for largest in _LARGEST[name]:
            scale = np.where(open_, peak / np.float32(largest), 1)
            ratio = groups / scale[..., None]
            whole = np.rint(ratio)
            fits = open_ & (np.abs(ratio - whole).max(-1) < 1e-4 * largest)
            integers[fits], scales[fits] = whole[fits], scale[fits]
            open_ &= ~fits
    if open_.any():
        raise ValueError(f"{name}: weights that are no integers times a scale")
    return integers, scales


class TileMemory:
    """One piece of memory for the tiles of all weights.

    Args:
        nbytes: of all tiles together, as `tiles_nbytes` counts them.
    """

    def __init__(self, nbytes: int) -> None:
        memory = np.zeros(nbytes + 64, np.uint8)  # pages are taken when they are first written
        start = -memory.ctypes.data % 64
        self._bytes = memory[start : start + nbytes]
        self._used = 0

    def take(self, rows: int, columns: int, form: str) -> Any:
        """Zeros for the tiles of a weight: uint8 [tiles, tile bytes], at a multiple of 64 bytes."""
        tiles, size = -(-rows // TILE_ROWS), tile_bytes(form, columns)
        start, self._used = self._used, self._used + tiles_nbytes(rows, columns, form)
        return self._bytes[start : start + tiles * size].reshape(tiles, size)


def tiles_nbytes(rows: int, columns: int, form: str) -> int:
    """Bytes of a weight's tiles, a multiple of 64."""
    return -(-(-(-rows // TILE_ROWS) * tile_bytes(form, columns)) // 64) * 64
