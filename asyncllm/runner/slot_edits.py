"""`SlotEdits`: what penalties and biases need on a device, for each sequence's slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.cuda.choice import IN_PROMPT, Edits
from asyncllm.sampling.penalties import penalised, repetition_penalty

if TYPE_CHECKING:
    from asyncllm.sampling.state import SamplingState

# Biases of a sequence at most: each costs every block of the vocabulary a look.
MOST_BIASES: Final = 512


class SlotEdits:
    """Counts, penalties and biases by slot.

    A slot's entries mean nothing until `put`, which writes all that its sequence will read; what
    another sequence or a step that was thrown away left there is gone then.

    Args:
        slots: sequences that are known at once.
        vocab_size: tokens that may be chosen.
        device: where.

    Attributes:
        arrays: what the kernels take.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._on_device = device.type == "cuda"

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        self.arrays = Edits(
            repetition=zeros(dtype=torch.float32),
            presence=zeros(dtype=torch.float64),
            frequency=zeros(dtype=torch.float64),
            counts=zeros(vocab_size, dtype=torch.int16),
            bias_ids=zeros(MOST_BIASES, dtype=torch.int32),
            biases=zeros(MOST_BIASES, dtype=torch.float32),
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device: 2 for each slot and token, and 4 KiB for each slot's biases."""
        edits = self.arrays
        numbers = (edits.repetition, edits.presence, edits.frequency)
        tables = (edits.counts, edits.bias_ids, edits.biases)
        return sum(tensor.nbytes for tensor in (*numbers, *tables))

    def put(self, slot: int, state: SamplingState) -> None:
        """Write a slot's entries, for the stream that is current."""
        params, edits = state.spec.params, self.arrays
        edits.repetition[slot].fill_(repetition_penalty(params))
        edits.presence[slot].fill_(params.presence_penalty)
        edits.frequency[slot].fill_(params.frequency_penalty)
        if penalised(params):
            self._send(self._counts(state, edits.counts.shape[1]), edits.counts[slot])
        if state.biases:
            ids, values = zip(*state.biases, strict=True)
            self._send(torch.tensor(ids, dtype=torch.int32), edits.bias_ids[slot])
            self._send(torch.tensor(values, dtype=torch.float32), edits.biases[slot])

    @staticmethod
    def _counts(state: SamplingState, vocab_size: int) -> Tensor:
        """int16 [vocab]: the output so far, and what the prompt has."""
        outputs = np.asarray(state.output_ids, np.int64)
        counts = np.bincount(outputs, minlength=vocab_size).clip(max=IN_PROMPT - 1)
        counts[np.asarray(state.spec.prompt_ids, np.int64)] |= IN_PROMPT
        return torch.from_numpy(counts.astype(np.uint16).view(np.int16))

    def _send(self, values: Tensor, target: Tensor) -> None:
        """To the beginning of `target`."""
        if self._on_device:
            # Copies from other memory wait for the steps that are under way.
            values = values.pin_memory()
        target[: len(values)].copy_(values, non_blocking=True)
