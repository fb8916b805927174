"""A model over a pool of its own, run by the plain program or another, pass by pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.checkpoint import open_checkpoint
from asyncllm.kv.blocks import KvCache
from asyncllm.kv.pool import KvPool, layer_groups
from asyncllm.model.causal_lm import CausalLM
from asyncllm.model.config import ModelConfig
from asyncllm.model.program import Chunk, PlainProgram
from tests.tiny_models import CONTEXT, VOCABULARY

LOGITS = 32
TOLERANCE = 1e-4  # of the largest logit


class Rig:
    """A model over a pool whose every number is no number before it is written.

    Each sequence gets blocks of its own; a windowed group's table is the ring that `KvCache` uses.
    `program` makes what computes from the rig; left out, the plain program does.
    """

    def __init__(
        self,
        path: Path,
        *,
        context_length: int = CONTEXT,
        block_tokens: int = 8,
        chunk: int = CONTEXT,
        sequences: int = 3,
        dtype: torch.dtype = torch.float32,
        should_stop: Callable[[], bool] = lambda: False,
        program: Callable[[Rig], Any] | None = None,
        **bind: Any,
    ) -> None:
        with open_checkpoint(path) as checkpoint:
            config = ModelConfig.from_checkpoint(checkpoint)
            self.model = CausalLM.bind(checkpoint, config, context_length=context_length, **bind)
        self.groups = layer_groups(
            config,
            block_tokens=block_tokens,
            chunk=chunk,
            max_seqs=sequences,
            context_length=context_length,
            kv_bytes=1 << 40,
            dtype=dtype,
        )
        self.cache = KvCache(
            self.groups,
            block_tokens=block_tokens,
            max_chunk=chunk,
            grow=lambda group, blocks: blocks,
            fingerprint=b"",
            prefix_cache=False,
        )
        self.pool = KvPool(
            self.groups,
            block_tokens=block_tokens,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )
        for buffer in (*self.pool.keys.values(), *self.pool.values.values()):
            buffer.fill_(torch.nan)
        self.max_rows, self.max_sequences, self.should_stop = chunk, sequences, should_stop
        # No common type: tests look into the workspace of one, the tiles of the other.
        self.program: Any = (program or plain)(self)
        shuffle = random.Random(3).sample
        self._free = [shuffle(range(g.capacity), g.capacity) for g in self.groups]

    def sequence(self, length: int) -> list[list[int]]:
        """Block tables for a new sequence of at most `length` tokens."""
        blocks = self.cache.blocks_for(length)
        counts = [blocks if ring is None else min(ring, blocks) for ring in self.cache.rings]
        return [[free.pop() for _ in range(n)] for free, n in zip(self._free, counts, strict=True)]

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits of every row of one pass, float32 [rows, vocabulary]."""
        with torch.inference_mode():
            rows = range(len(self.program.forward(chunks)))
            parts = [rows[at : at + LOGITS] for at in range(0, len(rows), LOGITS)]
            return torch.cat([self.program.logits(part).clone() for part in parts])

    def logits(self, tokens: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Logits of a new sequence's every position, computed in chunks of the sizes in turn."""
        tables, offset = self.sequence(len(tokens)), 0
        parts: list[Tensor] = []
        while offset < len(tokens):
            size = sizes[len(parts) % len(sizes)]
            chunk = Chunk(tokens[offset : offset + size], offset, tables)
            parts.append(self.run([chunk]))
            offset += size
        return torch.cat(parts)


def plain(rig: Rig) -> PlainProgram:
    return PlainProgram(
        rig.model,
        rig.pool,
        max_rows=rig.max_rows,
        max_logits=LOGITS,
        should_stop=rig.should_stop,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def assert_close(ours: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == expected.shape
    assert ours.isfinite().all(), "something that was never written was read"
    error = ((ours - expected).abs().amax() / expected.abs().amax()).item()
    assert error < tolerance, f"relative error {error:.2e}"
