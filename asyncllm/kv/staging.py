"""Memory between the K/V pool and the block store: slots that hold one block's bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncllm.kv.pool import KvPool
    from asyncllm.scheduler.step import BlockTransfer

# Blocks are gathered on the device, and scattered there, as many at a time as take this much.
CARRIED_BYTES: Final = 16 << 20


class Staging:
    """Slots in the host's memory, pinned where the pool is on a GPU.

    A block's bytes in a slot are those of its group's layers, one after another: K, V, and their
    scales where there are any.

    Transfers are put onto the current stream: what was saved is in its slot, and what was loaded
    has left it, when the step that they belong to has been collected.

    Args:
        pool: whose blocks they hold.
        count: how many.

    Attributes:
        slots: their bytes.
    """

    def __init__(self, pool: KvPool, count: int) -> None:
        import torch

        size = max(group.block_bytes for group in pool.groups)
        # Whole words where all goes up in them: torch gathers and scatters element by element.
        whole = all(
            buffer[0].nbytes % 8 == 0
            for group in pool.groups
            for buffer in _buffers(pool, group.layers)
        )
        word = torch.int64 if whole else torch.uint8
        self._device = next(iter(pool.keys.values())).device
        self._pinned = self._device.type == "cuda"
        memory = torch.empty((count, size), dtype=torch.uint8, pin_memory=self._pinned)
        self.slots = [memoryview(row) for row in memory.numpy()]
        self._memory = memory.view(word)
        carried = max(1, CARRIED_BYTES // size)
        shape = (carried, self._memory.shape[1])
        self._carrier = torch.empty(shape, dtype=word, device=self._device)
        movers = _LaunchedMover if self._pinned and whole else _TorchMover
        self._movers = [movers(_buffers(pool, group.layers), word) for group in pool.groups]

    def save(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy blocks to their slots."""
        for mover, part, blocks in self._parts(transfers):
            mover.gather(blocks, self._carrier)
            for row, transfer in enumerate(part):
                slot = self._memory[transfer.slot, : mover.words]
                slot.copy_(self._carrier[row, : mover.words], non_blocking=True)

    def load(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy slots to their blocks."""
        for mover, part, blocks in self._parts(transfers):
            for row, transfer in enumerate(part):
                slot = self._memory[transfer.slot, : mover.words]
                self._carrier[row, : mover.words].copy_(slot, non_blocking=True)
            mover.scatter(blocks, self._carrier)

    def _parts(
        self, transfers: Sequence[BlockTransfer]
    ) -> list[tuple[_TorchMover | _LaunchedMover, list[BlockTransfer], Tensor]]:
        """Transfers of one group each, as many as are carried at a time, with their blocks."""
        import torch

        parts = []
        for group, mover in enumerate(self._movers):
            own = [transfer for transfer in transfers if transfer.group == group]
            for at in range(0, len(own), len(self._carrier)):
                part = own[at : at + len(self._carrier)]
                blocks = torch.tensor([t.block for t in part], pin_memory=self._pinned)
                parts.append((mover, part, blocks.to(self._device, non_blocking=True)))
        return parts


def _buffers(pool: KvPool, layers: Sequence[int]) -> list[Tensor]:
    """K, V and scales of some layers, in the order of a slot's bytes."""
    return [
        buffer
        for layer in layers
        for buffer in (pool.keys[layer], pool.values[layer], *pool.scales.get(layer, ()))
    ]


class _TorchMover:
    """Moves words of blocks between a group's buffers and packed ones, a buffer at a time.

    Attributes:
        words: of a packed block.
    """

    def __init__(self, buffers: Sequence[Tensor], word: torch.dtype) -> None:
        self._pieces: list[tuple[Tensor, slice]] = []
        self.words = 0
        for buffer in buffers:
            flat = buffer.flatten(1).view(word)
            self._pieces.append((flat, slice(self.words, self.words + flat.shape[1])))
            self.words += flat.shape[1]

    def gather(self, blocks: Tensor, packed: Tensor) -> None:
        for flat, place in self._pieces:
            packed[: len(blocks), place] = flat.index_select(0, blocks)

    def scatter(self, blocks: Tensor, packed: Tensor) -> None:
        for flat, place in self._pieces:
            flat.index_copy_(0, blocks, packed[: len(blocks), place])


class _LaunchedMover:
    """The same in one launch, on a GPU."""

    def __init__(self, buffers: Sequence[Tensor], word: torch.dtype) -> None:
        from asyncllm.kernels.cuda import blocks as kernel

        self._kernel, self._group = kernel, kernel.pieces(buffers)
        self.words = self._group.words

    def gather(self, blocks: Tensor, packed: Tensor) -> None:
        self._kernel.gather(self._group, blocks, packed)

    def scatter(self, blocks: Tensor, packed: Tensor) -> None:
        self._kernel.scatter(self._group, blocks, packed)
