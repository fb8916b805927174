"""Every operation of a model in plain torch: the floor that runs everywhere, and the oracle.

Rows do not depend on each other, and as far as torch's products allow not even in their last bits:
the number of rows of a product is a multiple of `ROW_MULTIPLE` (see `padded_rows`), and attention
adds up values in runs of `KEY_RUN` keys that begin at multiples of it. With MKL that makes a row's
result bit for bit the same whatever runs beside it and however a prompt is cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.checkpoint.unpack import paired_columns, unpack_paired, unpacks_paired

if TYPE_CHECKING:
    from asyncllm.checkpoint.formats import Format

# Products of fewer rows than a register tile take another path through MKL, with other roundings.
ROW_MULTIPLE: Final = 4

# Keys are padded to a multiple of this, for the same reason.
KEY_MULTIPLE: Final = 16

# Values are added up over so many keys at a time: MKL cuts longer sums where it likes.
KEY_RUN: Final = 128

# Weights unpacked at a time. Larger slabs mean fewer calls, smaller ones stay in the caches.
SLAB_WEIGHTS: Final = 1 << 19


def padded_rows(rows: int) -> int:
    """Rows that a product is made with when `rows` are wanted."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix as the checkpoint stores it.

    Attributes:
        name: of the tensor.
        format: how its rows are packed.
        data: uint8 [rows, row_bytes], not copied; may be a view of a mapped file.
        rows: outputs of a linear layer.
        columns: its inputs.
    """

    name: str
    format: Format
    data: Tensor
    rows: int
    columns: int


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """`out = x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension, float32."""
    # The bits of `functional.rms_norm`, with less traffic.
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    torch.mul(x, scale, out=out).mul_(weight)


def linear(x: Tensor, weight: PackedWeight, scratch: Tensor, out: Tensor) -> None:
    """`out = x @ weight.T`; the weight is unpacked a slab of rows at a time.

    Args:
        x: float32 [rows, columns].
        weight: packed [outputs, columns].
        scratch: float32, flat; holds one slab, at least one row.
        out: float32 [rows, outputs]; its rows may lie apart.
    """
    step = max(1, min(weight.rows, scratch.numel() // weight.columns))
    slab = scratch[: step * weight.columns].view(step, weight.columns)
    paired = unpacks_paired(weight.format, x.device)
    if paired:
        # The same products, added up in another order.
        x = paired_columns(x)
    for start in range(0, weight.rows, step):
        raw = weight.data[start : start + step]
        if paired:
            weights = unpack_paired(raw, weight.columns)
        else:
            weights = slab[: len(raw)]
            weight.format.unpack(raw, weights)
        torch.mm(x, weights.t(), out=out[:, start : start + len(raw)])


def linear_float32(x: Tensor, weight: PackedWeight, scratch: Tensor, out: Tensor) -> None:
    """As `linear`, for weights that need no unpacking."""
    torch.mm(x, weight.data.view(torch.float32).t(), out=out)


def embedding(tokens: Tensor, weight: PackedWeight, scale: float, raw: Tensor, out: Tensor) -> None:
    """`out[i] = weight[tokens[i]] * scale`; only the rows asked for are unpacked.

    Args:
        tokens: int64 [rows].
        weight: packed [vocabulary, columns].
        scale: 1 leaves the rows as they are.
        raw: uint8 [rows, row_bytes], working memory.
        out: float32 [rows, columns].
    """
    torch.index_select(weight.data, 0, tokens, out=raw)
    weight.format.unpack(raw, out)
    if scale != 1.0:
        out.mul_(scale)


def rope(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scratch: Tensor) -> None:
    """Rotate the leading elements of every head in place.

    Args:
        heads: float32 [rows, heads, head_dim].
        cos: float32 [rows, rotary_dim / 2].
        sin: likewise.
        interleaved: pairs are elements 2i and 2i+1; otherwise i and i + rotary_dim / 2.
        scratch: float32, flat, at least rows * heads * rotary_dim elements.
    """
    half = cos.shape[1]
    if interleaved:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    products = scratch[: 2 * first.numel()].view(2, *first.shape)
    torch.mul(first, sin, out=products[0])
    torch.mul(second, sin, out=products[1])
    first.mul_(cos).sub_(products[1])
    second.mul_(cos).add_(products[0])


def gated(gate: Tensor, up: Tensor, activation: str) -> None:
    """`gate = activation(gate) * up` in place; `"silu"` or `"gelu_tanh"`."""
    if activation == "silu":
        functional.silu(gate, inplace=True).mul_(up)
    else:
        torch.ops.aten.gelu_(gate, approximate="tanh").mul_(up)


def softcap(values: Tensor, cap: float) -> None:
    """`values = cap * tanh(values / cap)` in place."""
    values.div_(cap).tanh_().mul_(cap)


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys that some consecutive queries of one sequence see, as blocks of the pool.

    Attributes:
        first_row: of the queries in the step's rows.
        rows: how many queries.
        offset: position of the first query; the others follow it.
        window: tokens a query sees, itself included; `None`: all.
        first_key: position of the first token of the first block.
        keys: from `first_key` to the last query, itself included.
        blocks: int64, the ids of the blocks that hold them.
    """

    first_row: int
    rows: int
    offset: int
    window: int | None
    first_key: int
    keys: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Working memory of `attention`, sized once.

    Attributes:
        keys: [tokens, kv_heads, head_dim] of the pool's dtype, for gathered keys.
        values: likewise.
        widened_keys: float32 [tokens, kv_heads, head_dim]; the same memory if the pool is float32.
        widened_values: likewise.
        queries: float32, flat.
        scores: float32, flat; what bounds the queries taken at a time.
        hidden: bool, flat, as long as `scores`.
        result: float32, flat, as long as `queries`.
        positions: int64 [0, 1, 2 ...], as many as `keys` has tokens.
    """

    keys: Tensor
    values: Tensor
    widened_keys: Tensor
    widened_values: Tensor
    queries: Tensor
    scores: Tensor
    hidden: Tensor
    result: Tensor
    positions: Tensor


def attention(
    queries: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    span: KeySpan,
    scale: float,
    cap: float,
    scratch: AttentionScratch,
    out: Tensor,
) -> None:
    """Causal attention of one sequence's rows over its blocks.

    Args:
        queries: float32 [all rows, heads, head_dim]; those of the span are read.
        key_pool: [blocks, block_tokens, kv_heads, head_dim].
        value_pool: likewise.
        span: which rows, and which blocks.
        scale: multiplies the queries.
        cap: softcap of the scores; 0: none.
        scratch: working memory.
        out: float32 [all rows, heads, head_dim]; those of the span are written.
    """
    kv_heads, head_dim = key_pool.shape[2:]
    group = queries.shape[1] // kv_heads
    padded = -(-span.keys // KEY_MULTIPLE) * KEY_MULTIPLE
    keys = _gather(key_pool, span, padded, scratch.keys, scratch.widened_keys).permute(1, 2, 0)
    values = _gather(value_pool, span, padded, scratch.values, scratch.widened_values)
    values = values.transpose(0, 1)
    lines = min(
        scratch.scores.numel() // (kv_heads * padded),
        scratch.queries.numel() // (kv_heads * head_dim),
    )
    tile = lines // ROW_MULTIPLE * ROW_MULTIPLE // group
    for start in range(0, span.rows, tile):
        rows = min(tile, span.rows - start)
        own = slice(span.first_row + start, span.first_row + start + rows)
        used = rows * group
        lines = padded_rows(used)
        grouped = _shaped(scratch.queries, kv_heads, lines, head_dim)
        torch.mul(
            queries[own].view(rows, kv_heads, group, head_dim).transpose(0, 1),
            scale,
            out=grouped[:, :used].view(kv_heads, rows, group, head_dim),
        )
        scores = _shaped(scratch.scores, kv_heads, lines, padded)
        torch.bmm(grouped, keys, out=scores)
        if cap:
            softcap(scores, cap)
        _hide(scores[:, :used], span, start, rows, group, scratch)
        torch.softmax(scores, -1, out=scores)
        result = _shaped(scratch.result, kv_heads, lines, head_dim)
        for at, (low, high) in enumerate(_runs(span.first_key, padded)):
            torch.baddbmm(
                result,
                scores[:, :, low:high],
                values[:, low:high],
                beta=float(at > 0),
                out=result,
            )
        out[own].view(rows, kv_heads, group, head_dim).transpose(0, 1).copy_(
            result[:, :used].view(kv_heads, rows, group, head_dim)
        )


def _shaped(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)


def _gather(pool: Tensor, span: KeySpan, padded: int, gathered: Tensor, widened: Tensor) -> Tensor:
    """The span's keys or values as float32 [padded, kv_heads, head_dim]."""
    blocks, block_tokens = len(span.blocks), pool.shape[1]
    whole = gathered[: blocks * block_tokens]
    torch.index_select(pool, 0, span.blocks, out=whole.view(blocks, *pool.shape[1:]))
    if widened is not gathered:
        widened[: span.keys].copy_(gathered[: span.keys])
    # What other sequences left in the rest of the block must not reach the products, where
    # 0 * inf is no number.
    if padded > span.keys:
        widened[span.keys : padded].zero_()
    return widened[:padded]


def _hide(
    scores: Tensor, span: KeySpan, start: int, rows: int, group: int, scratch: AttentionScratch
) -> None:
    """Set scores of keys that a query does not see to -inf."""
    padded = scores.shape[2]
    first = span.offset + start - span.first_key  # the first query, counted from the first key
    if rows == 1:
        scores[:, :, first + 1 :].fill_(-torch.inf)
        if span.window is not None and first >= span.window:
            scores[:, :, : first - span.window + 1].fill_(-torch.inf)
        return
    key = scratch.positions[:padded].unsqueeze(0)
    query = scratch.positions[first : first + rows].unsqueeze(1)
    hidden = scratch.hidden[: rows * padded].view(rows, padded)
    torch.gt(key, query, out=hidden)
    if span.window is not None:
        hidden.logical_or_(key <= query - span.window)
    scores.view(len(scores), rows, group, padded).masked_fill_(hidden.unsqueeze(1), -torch.inf)


def _runs(first_key: int, keys: int) -> list[tuple[int, int]]:
    """Runs of keys that end at multiples of `KEY_RUN` positions, counted from the first key."""
    ends = [*range(KEY_RUN - first_key % KEY_RUN, keys, KEY_RUN), keys]
    return list(zip([0, *ends], ends, strict=False))
