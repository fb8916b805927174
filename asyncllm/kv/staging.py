"""Memory between the K/V pool and the block store: slots that hold one block's bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
        # For each group the words of each block in each of its buffers, and where they go.
        self._pieces: list[list[tuple[Tensor, int, int]]] = []
        for group in pool.groups:
            pieces, start = [], 0
            for buffer in _buffers(pool, group.layers):
                flat = buffer.flatten(1).view(word)
                pieces.append((flat, start, start + flat.shape[1]))
                start += flat.shape[1]
            self._pieces.append(pieces)

    def save(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy blocks to their slots."""
        for group, part, blocks in self._parts(transfers):
            for flat, start, stop in self._pieces[group]:
                self._carrier[: len(part), start:stop] = flat.index_select(0, blocks)
            size = self._pieces[group][-1][2]
            for row, transfer in enumerate(part):
                slot = self._memory[transfer.slot, :size]
                slot.copy_(self._carrier[row, :size], non_blocking=True)

    def load(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy slots to their blocks."""
        for group, part, blocks in self._parts(transfers):
            size = self._pieces[group][-1][2]
            for row, transfer in enumerate(part):
                slot = self._memory[transfer.slot, :size]
                self._carrier[row, :size].copy_(slot, non_blocking=True)
            for flat, start, stop in self._pieces[group]:
                flat.index_copy_(0, blocks, self._carrier[: len(part), start:stop])

    def _parts(
        self, transfers: Sequence[BlockTransfer]
    ) -> list[tuple[int, list[BlockTransfer], Tensor]]:
        """Transfers of one group each, as many as are carried at a time, with their blocks."""
        import torch

        parts = []
        for group in range(len(self._pieces)):
            own = [transfer for transfer in transfers if transfer.group == group]
            for at in range(0, len(own), len(self._carrier)):
                part = own[at : at + len(self._carrier)]
                blocks = torch.tensor([t.block for t in part], pin_memory=self._pinned)
                parts.append((group, part, blocks.to(self._device, non_blocking=True)))
        return parts


def _buffers(pool: KvPool, layers: Sequence[int]) -> list[Tensor]:
    """K, V and scales of some layers, in the order of a slot's bytes."""
    return [
        buffer
        for layer in layers
        for buffer in (pool.keys[layer], pool.values[layer], *pool.scales.get(layer, ()))
    ]
