"""Repetition, presence and frequency penalties of one sequence, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from asyncllm.options import SamplingParams


class Penalties:
    """What the penalties do to each token of the vocabulary.

    Two dense float32 [vocab] vectors, so that a token costs the same however long the sequence is:
    the repetition penalty of tokens in prompt or output (1 elsewhere), and what presence and
    frequency penalties subtract for tokens in the output (0 elsewhere).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int],
        output_ids: Iterable[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._repetition = repetition_penalty(params)
        self._counts: dict[int, int] = {}
        self._scale: Tensor | None = None
        self._offset: Tensor | None = None
        if self._repetition != 1.0:
            self._scale = torch.ones(vocab_size, dtype=torch.float32, device=device)
            seen = sorted({*prompt_ids, *output_ids})
            self._scale[torch.tensor(seen, dtype=torch.int64, device=device)] = self._repetition
        if self._presence or self._frequency:
            self._offset = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        for token in output_ids:
            self.count(token)

    def count(self, token: int) -> None:
        """The output has one more token."""
        if self._scale is not None:
            self._scale[token] = self._repetition
        if self._offset is not None:
            count = self._counts[token] = self._counts.get(token, 0) + 1
            self._offset[token] = self._presence + self._frequency * count

    def apply(self, row: Tensor) -> None:
        """Penalise float32 logits [vocab] in place."""
        if self._scale is not None:
            torch.where(row > 0, row / self._scale, row * self._scale, out=row)
        if self._offset is not None:
            row -= self._offset


def repetition_penalty(params: SamplingParams) -> float:
    """The repetition penalty, 1 (off) where it is not set."""
    return 1.0 if params.repetition_penalty is None else params.repetition_penalty


def penalised(params: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return bool(
        params.presence_penalty or params.frequency_penalty or repetition_penalty(params) != 1.0
    )
