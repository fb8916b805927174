"""The plain program's buffers: one layer's activations for one pass, allocated once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from asyncllm.kernels.reference import (
    KEY_MULTIPLE,
    SLAB_WEIGHTS,
    AttentionScratch,
    padded_rows,
)

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool
    from asyncllm.model.causal_lm import CausalLM

# Attention scores held at a time; more queries than fit are taken in turns.
SCORES: Final = 1 << 21

# What operators without an `out` return, a few MB, glibc's malloc gives back to the system and gets
# anew, a page fault each 4 KiB, until it has seen a block freed that is larger (32 MiB at most).
LARGE_BLOCK_BYTES: Final = 24 << 20


class Workspace:
    """Buffers sized for the widest pass; every layer uses the same ones.

    Args:
        model: whose dimensions count.
        pool: whose capacity bounds the keys of one sequence.
        max_rows: rows of a pass at most.
        max_logits: rows of logits at a time at most.

    Attributes:
        max_rows: rows of a pass, a multiple of what products are made with.
        residual: float32 [max_rows, embedding], the residual stream.
        normed: likewise; input of a block, then its output.
        qkv: float32 [max_rows, (heads + 2 kv_heads) head_dim].
        attended: float32 [max_rows, heads, head_dim].
        gate_up: float32 [max_rows, 2 feed_forward].
        products: float32, flat, for the rotary embedding.
        raw_embeddings: uint8 [max_rows, row_bytes], packed embeddings of a pass.
        slab: float32, flat, unpacked weights.
        chosen: float32 [max_logits, embedding], rows whose logits are made.
        logits: float32 [max_logits, vocab_size].
        attention: working memory of attention.
    """

    def __init__(self, model: CausalLM, pool: KvPool, max_rows: int, max_logits: int) -> None:
        torch.empty(LARGE_BLOCK_BYTES, dtype=torch.uint8)  # freed at once, never touched
        config = model.config
        rows = self.max_rows = padded_rows(max_rows)
        heads = config.heads + 2 * config.kv_heads
        self.max_logits = padded_rows(max_logits)
        self.residual = torch.zeros(rows, config.embedding)
        self.normed = torch.zeros(rows, config.embedding)
        self.qkv = torch.zeros(rows, heads * config.head_dim)
        self.attended = torch.zeros(rows, config.heads, config.head_dim)
        self.gate_up = torch.zeros(rows, 2 * config.feed_forward)
        self.products = torch.empty(rows * heads * config.head_dim)
        row_bytes = model.embedding.data.shape[1]
        self.raw_embeddings = torch.empty(rows, row_bytes, dtype=torch.uint8)
        widest = max(config.embedding, config.feed_forward, config.heads * config.head_dim)
        self.slab = torch.empty(max(SLAB_WEIGHTS, widest))
        self.chosen = torch.zeros(self.max_logits, config.embedding)
        self.logits = torch.zeros(self.max_logits, config.vocab_size)
        self.attention = _attention_scratch(model, pool, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together."""
        scratch = self.attention
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        tensors += {
            buffer.data_ptr(): buffer
            for buffer in (getattr(scratch, name) for name in scratch.__slots__)
        }.values()
        return sum(tensor.nbytes for tensor in tensors)


def _attention_scratch(model: CausalLM, pool: KvPool, rows: int) -> AttentionScratch:
    config, size = model.config, pool.block_tokens
    group = config.heads // config.kv_heads
    keys = 0
    for layers in pool.groups:
        # A pool may hold less than the widest pass; the throwaway steps at load, which write to the
        # null block alone, are not bound by that.
        seen = min(model.context_length, max(layers.capacity * size, rows + 1))
        if layers.window is not None:
            # A ring has all blocks a chunk sees, also where the window begins inside one.
            seen = min(model.context_length, layers.window - 1 + rows + size)
        keys = max(keys, -(-seen // size) * size)
    keys = -(-keys // KEY_MULTIPLE) * KEY_MULTIPLE
    shape = (keys, config.kv_heads, config.head_dim)
    dtype = next(iter(pool.keys.values())).dtype
    gathered_keys, gathered_values = (torch.zeros(shape, dtype=dtype) for _ in range(2))
    widen = dtype != torch.float32
    lines = padded_rows(group * rows)
    # At least one query's lines over all keys must fit.
    least = config.kv_heads * padded_rows(group) * keys
    scores = max(least, min(SCORES, config.kv_heads * lines * keys))
    return AttentionScratch(
        keys=gathered_keys,
        values=gathered_values,
        widened_keys=torch.zeros(shape) if widen else gathered_keys,
        widened_values=torch.zeros(shape) if widen else gathered_values,
        queries=torch.zeros(config.kv_heads * lines * config.head_dim),
        scores=torch.empty(scores),
        hidden=torch.empty(scores, dtype=torch.bool),
        result=torch.empty(config.kv_heads * lines * config.head_dim),
        positions=torch.arange(keys),
    )
