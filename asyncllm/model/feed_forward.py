"""A gated feed-forward: its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from asyncllm.model.linear import Binder, Linear

if TYPE_CHECKING:
    from asyncllm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Weights of one feed-forward.

    Attributes:
        norm: before it.
        gate_up: gate and up, in this order, as two layers or as one.
        down: back to the residual stream's width.
        post_norm: after it, where the family has it.
    """

    norm: Tensor
    gate_up: tuple[Linear, ...]
    down: Linear
    post_norm: Tensor | None


def bind_feed_forward(binder: Binder, config: ModelConfig, index: int) -> FeedForward:
    """Take the tensors of layer `index`."""
    family, prefix = config.architecture, f"blk.{index}."
    width, inner = config.embedding, config.feed_forward

    def linear(name: str, outputs: int, inputs: int) -> Linear:
        return binder.linear(binder.matrix(f"{prefix}{name}.weight", outputs, inputs))

    if family.fused_gate_up:  # which GGUF calls ffn_up
        gate_up: tuple[Linear, ...] = (linear("ffn_up", 2 * inner, width),)
    else:
        gate_up = (linear("ffn_gate", inner, width), linear("ffn_up", inner, width))
    post = f"{prefix}post_ffw_norm.weight"
    return FeedForward(
        norm=binder.vector(f"{prefix}ffn_norm.weight", width),
        gate_up=gate_up,
        down=linear("ffn_down", width, inner),
        post_norm=binder.vector(post, width) if family.post_norms else None,
    )
