"""The plain program: a `CausalLM` computed operation by operation, for rows of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncllm.kernels.reference import KeySpan, padded_rows
from asyncllm.model.rope import cos_sin
from asyncllm.model.workspace import Workspace
from asyncllm.scheduler.step import StepInterrupted

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool
    from asyncllm.model.attention import Attention
    from asyncllm.model.causal_lm import CausalLM
    from asyncllm.model.feed_forward import FeedForward


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence.

    Attributes:
        tokens: their ids.
        offset: position of the first.
        tables: for each layer group the sequence's block ids; see `Row.block_tables`.
    """

    tokens: Sequence[int]
    offset: int
    tables: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one pass needs to know of its rows, the padding rows included."""

    rows: int
    tokens: Tensor
    ropes: list[tuple[Tensor, Tensor]]
    slots: list[Tensor]  # for each group, where in the pool each row's K and V go
    spans: list[list[KeySpan]]  # for each group


def _never() -> bool:
    return False


class PlainProgram:
    """Computes hidden states and logits of a step's rows, writing K and V into the pool.

    Everything of a size that depends on the model, the chunk or the context is allocated here,
    once. Call it under `torch.inference_mode`.

    Args:
        model: bound weights.
        pool: where K and V are.
        max_rows: rows of a pass at most, over all sequences.
        max_logits: rows of logits at a time at most.
        should_stop: asked before every layer; when it says so the pass ends with
            `StepInterrupted`.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KvPool,
        *,
        max_rows: int,
        max_logits: int,
        should_stop: Callable[[], bool] = _never,
    ) -> None:
        self.model = model
        self.pool = pool
        self.workspace = Workspace(model, pool, max_rows, max_logits)
        self._should_stop = should_stop
        self._group_of = {
            layer: index for index, group in enumerate(pool.groups) for layer in group.layers
        }
        config = model.config
        device = "cpu"
        choose = model.kernels.choose
        self._embedding = choose("embedding", device=device, format=model.embedding.format.name)
        self._rms_norm = choose("rms_norm", device=device)
        self._rope = choose("rope", device=device)
        self._attention = choose("attention", device=device, head_dim=config.head_dim)
        self._gated = choose("gated", device=device)
        self._softcap = choose("softcap", device=device)

    def step_seq(
        self, sequence: Sequence[Sequence[int]], tokens: Sequence[int], offset: int, count: int
    ) -> Tensor:
        """Advance one sequence by a chunk; decode is the chunk of one token.

        Args:
            sequence: its block tables, one for each layer group.
            tokens: ids of the whole sequence, or at least up to the chunk's end.
            offset: position of the chunk's first token.
            count: tokens in the chunk.

        Returns:
            Logits after the last token, float32 [vocab_size]; valid until the next call.
        """
        self.forward([Chunk(tokens[offset : offset + count], offset, sequence)])
        return self.logits([count - 1])[0]

    def forward(
        self, chunks: Sequence[Chunk], wanted: Sequence[int] = (), draws: Sequence[object] = ()
    ) -> Tensor:
        """One pass over the weights for all the chunks' rows.

        Args:
            chunks: rows of some sequences.
            wanted: of no use here: logits are made when they are asked for.
            draws: likewise: the sampler chooses.

        Returns:
            Normed hidden states, float32 [rows, embedding], chunk after chunk; valid until the
            next pass.

        Raises:
            StepInterrupted: `should_stop` said so.
            ValueError: more rows than were asked for when this was made.
        """
        model, work = self.model, self.workspace
        batch = self._batch(chunks)
        x = work.residual[: batch.rows]
        raw = work.raw_embeddings[: batch.rows]
        self._embedding(batch.tokens, model.embedding, model.config.embedding_scale, raw, x)
        for index, layer in enumerate(model.layers):
            if self._should_stop():
                raise StepInterrupted(f"before layer {index}")
            self._attend(layer.attention, index, batch.ropes[layer.rope], batch)
            self._feed_forward(layer.feed_forward, batch.rows)
        hidden = work.normed[: batch.rows]
        self._rms_norm(x, model.output_norm, model.config.norm_eps, hidden)
        return hidden[: sum(len(chunk.tokens) for chunk in chunks)]

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of some rows of the last pass.

        Args:
            rows: numbers of its rows, at most `workspace.max_logits`.

        Returns:
            float32 [len(rows), vocab_size]; valid until the next call.
        """
        work, config = self.workspace, self.model.config
        padded = [*rows, *(rows[0],) * (padded_rows(len(rows)) - len(rows))]
        chosen = work.chosen[: len(padded)]
        torch.index_select(work.normed, 0, torch.tensor(padded), out=chosen)
        logits = work.logits[: len(padded)]
        self.model.head(chosen, work.slab, logits)
        logits = logits[: len(rows)]
        if config.final_softcap:
            self._softcap(logits, config.final_softcap)
        return logits

    def choices(self, rows: Sequence[int], draws: Sequence[object]) -> None:
        """The sampler chooses."""

    def _batch(self, chunks: Sequence[Chunk]) -> _Batch:
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [chunk.offset + index for chunk in chunks for index in range(len(chunk.tokens))]
        rows = padded_rows(len(tokens))
        if not 0 < rows <= self.workspace.max_rows:
            raise ValueError(
                f"a pass of {len(tokens)} rows; room is for 1 to {self.workspace.max_rows}"
            )
        padding = rows - len(tokens)
        where = torch.tensor([*positions, *[0] * padding])
        return _Batch(
            rows,
            torch.tensor([*tokens, *[0] * padding]),
            [cos_sin(frequencies, scale, where) for frequencies, scale in self.model.ropes],
            [self._slots(group, chunks, padding) for group in range(len(self.pool.groups))],
            [self._spans(group, chunks) for group in range(len(self.pool.groups))],
        )

    def _slots(self, group: int, chunks: Sequence[Chunk], padding: int) -> Tensor:
        size = self.pool.block_tokens
        slots = []
        for chunk in chunks:
            table = chunk.tables[group]
            ring = self._ring(group, table)
            for position in range(chunk.offset, chunk.offset + len(chunk.tokens)):
                number, within = divmod(position, size)
                slots.append(table[number % ring] * size + within)
        # Rows that only pad write to the null block, over each other.
        slots += [self.pool.null_block(group) * size] * padding
        return torch.tensor(slots)

    def _spans(self, group: int, chunks: Sequence[Chunk]) -> list[KeySpan]:
        size, window = self.pool.block_tokens, self.pool.groups[group].window
        spans, row = [], 0
        for chunk in chunks:
            count, table = len(chunk.tokens), chunk.tables[group]
            ring = self._ring(group, table)
            end = chunk.offset + count
            seen = 0 if window is None else max(0, chunk.offset - window + 1)
            first, last = seen // size, -(-end // size)
            blocks = torch.tensor([table[number % ring] for number in range(first, last)])
            first_key = first * size
            keys = end - first_key
            spans.append(KeySpan(row, count, chunk.offset, window, first_key, keys, blocks))
            row += count
        return spans

    def _ring(self, group: int, table: Sequence[int]) -> int:
        """What block numbers are taken modulo."""
        return len(table) if self.pool.groups[group].window is not None else 1 << 62

    def _attend(
        self, block: Attention, index: int, tables: tuple[Tensor, Tensor], batch: _Batch
    ) -> None:
        config, work, rows = self.model.config, self.workspace, batch.rows
        heads, kv_heads = config.heads, config.kv_heads
        x, normed, qkv = work.residual[:rows], work.normed[:rows], work.qkv[:rows]
        self._rms_norm(x, block.norm, config.norm_eps, normed)
        start = 0
        for projection in block.projections:
            projection(normed, work.slab, qkv[:, start : start + projection.outputs])
            start += projection.outputs
        q_k_v = qkv.view(rows, heads + 2 * kv_heads, config.head_dim)
        q, k = q_k_v[:, :heads], q_k_v[:, heads : heads + kv_heads]
        if block.q_norm is not None:
            self._rms_norm(q, block.q_norm, config.norm_eps, q)
        if block.k_norm is not None:
            self._rms_norm(k, block.k_norm, config.norm_eps, k)
        self._rope(
            q_k_v[:, : heads + kv_heads],
            *tables,
            config.architecture.interleaved_rope,
            work.products,
        )
        group = self._group_of[index]
        keys, values = self.pool.keys[index], self.pool.values[index]
        for pool, new in ((keys, k), (values, q_k_v[:, heads + kv_heads :])):
            pool.flatten(0, 1).index_copy_(0, batch.slots[group], new.to(pool.dtype))
        attended = work.attended[:rows]
        for span in batch.spans[group]:
            self._attention(
                q,
                keys,
                values,
                span,
                config.query_scale,
                config.attention_softcap,
                work.attention,
                attended,
            )
        block.output(attended.view(rows, -1), work.slab, normed)
        if block.post_norm is not None:
            self._rms_norm(normed, block.post_norm, config.norm_eps, normed)
        x.add_(normed)

    def _feed_forward(self, block: FeedForward, rows: int) -> None:
        config, work = self.model.config, self.workspace
        x, normed, gate_up = work.residual[:rows], work.normed[:rows], work.gate_up[:rows]
        self._rms_norm(x, block.norm, config.norm_eps, normed)
        start = 0
        for linear in block.gate_up:
            linear(normed, work.slab, gate_up[:, start : start + linear.outputs])
            start += linear.outputs
        gate, up = gate_up[:, : config.feed_forward], gate_up[:, config.feed_forward :]
        self._gated(gate, up, config.architecture.activation)
        block.down(gate, work.slab, normed)
        if block.post_norm is not None:
            self._rms_norm(normed, block.post_norm, config.norm_eps, normed)
        x.add_(normed)
