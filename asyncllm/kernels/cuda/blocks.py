"""Whole blocks of the K/V pool, gathered from all its buffers or scattered to them in one launch.

Nothing here allocates or synchronises, but for what `pieces` makes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_WORDS: tl.constexpr = tl.constexpr(2048)  # that a program moves at a time


@triton.jit
def _move(packed, width, blocks, table, SAVES: tl.constexpr):
    """Programs are (row, piece, part): some of a block's words in one buffer."""
    row, piece = tl.program_id(0), tl.program_id(1)
    base = tl.load(table + 4 * piece).to(tl.pointer_type(tl.int64))
    stride, size = tl.load(table + 4 * piece + 1), tl.load(table + 4 * piece + 2)
    start = tl.load(table + 4 * piece + 3)
    word = tl.program_id(2) * _WORDS + tl.arange(0, _WORDS)
    here = word < size
    inside = base + tl.load(blocks + row) * stride + word
    outside = packed + row * width + start + word
    if SAVES:
        tl.store(outside, tl.load(inside, mask=here), mask=here)
    else:
        tl.store(inside, tl.load(outside, mask=here), mask=here)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The buffers of a group's layers.

    Attributes:
        table: int64 [buffers, 4]: address, words from a block to the next, words of a block, and
            where they begin in a packed one.
        words: of a packed block.
        largest: words of a block in the buffer that has the most.
    """

    table: Tensor
    words: int
    largest: int


def pieces(buffers: Sequence[Tensor]) -> Pieces:
    """Buffers [blocks, ...] that stay where they are; a block has whole words, side by side.

    Packed, a block's bytes are those of the first buffer, then the second's, and so on.
    """
    rows, start = [], 0
    for buffer in buffers:
        words, rest = divmod(buffer[0].nbytes, 8)
        stride, other = divmod(buffer.stride(0) * buffer.itemsize, 8)
        if rest or other or not buffer[0].is_contiguous():
            raise ValueError(f"blocks of {buffer[0].nbytes} bytes are no whole words side by side")
        rows.append((buffer.data_ptr(), stride, words, start))
        start += words
    largest = max(words for _, _, words, _ in rows)
    return Pieces(torch.tensor(rows, device=buffers[0].device), start, largest)


def gather(group: Pieces, blocks: Tensor, packed: Tensor) -> None:
    """Copy blocks, int64 [count], to `packed`, int64 [>= count, >= words]."""
    _launch(group, blocks, packed, saves=True)


def scatter(group: Pieces, blocks: Tensor, packed: Tensor) -> None:
    """Copy them back; the blocks are different ones."""
    _launch(group, blocks, packed, saves=False)


def _launch(group: Pieces, blocks: Tensor, packed: Tensor, saves: bool) -> None:
    grid = len(blocks), len(group.table), triton.cdiv(group.largest, _WORDS.value)
    _move[grid](packed, packed.stride(0), blocks, group.table, SAVES=saves, num_warps=4)
