"""An attention block: its weights, and one step of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from asyncllm.model.linear import Binder, Linear

if TYPE_CHECKING:
    from asyncllm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one attention block.

    Attributes:
        norm: before it.
        projections: q, k and v, in this order, as three layers or as one.
        output: back to the residual stream's width.
        q_norm: over each head of q, where the family has it.
        k_norm: likewise.
        post_norm: after it, where the family has it.
    """

    norm: Tensor
    projections: tuple[Linear, ...]
    output: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor | None


def bind_attention(binder: Binder, config: ModelConfig, index: int) -> Attention:
    """Take the tensors of layer `index`."""
    family, prefix = config.architecture, f"blk.{index}."

    def projection(name: str, outputs: int, inputs: int) -> Linear:
        bias = f"{prefix}{name}.bias"
        wanted = name in family.biases or (name in family.optional_biases and bias in binder)
        return binder.linear(
            binder.matrix(f"{prefix}{name}.weight", outputs, inputs),
            binder.vector(bias, outputs) if wanted else None,
        )

    def norm(name: str, size: int, wanted: bool = True) -> Tensor | None:
        return binder.vector(f"{prefix}{name}.weight", size) if wanted else None

    width, head_dim = config.embedding, config.head_dim
    q_width, kv_width = config.heads * head_dim, config.kv_heads * head_dim
    if family.fused_qkv:
        projections: tuple[Linear, ...] = (projection("attn_qkv", q_width + 2 * kv_width, width),)
    else:
        projections = (
            projection("attn_q", q_width, width),
            projection("attn_k", kv_width, width),
            projection("attn_v", kv_width, width),
        )
    return Attention(
        norm=binder.vector(f"{prefix}attn_norm.weight", width),
        projections=projections,
        output=projection("attn_output", width, q_width),
        q_norm=norm("attn_q_norm", head_dim, family.qk_norm),
        k_norm=norm("attn_k_norm", head_dim, family.qk_norm),
        post_norm=norm("post_attention_norm", width, family.post_norms),
    )
