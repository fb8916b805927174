"""`CausalLM`: a model's layers bound to a checkpoint. It holds weights; programs compute with them.

Tensors are taken by their GGUF names. Nothing is computed here but what every step would repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from asyncllm.kernels.ops import KernelTable
from asyncllm.kernels.reference import PackedWeight
from asyncllm.model.attention import Attention, bind_attention
from asyncllm.model.config import EMBEDDING, ModelConfig
from asyncllm.model.feed_forward import FeedForward, bind_feed_forward
from asyncllm.model.linear import Binder, Linear
from asyncllm.model.rope import (
    FREQUENCY_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    RopeConfig,
    factors_name,
    inverse_frequencies,
)

if TYPE_CHECKING:
    from asyncllm.checkpoint.checkpoint import Checkpoint, TensorInfo


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        attention: with the norms around it.
        feed_forward: likewise.
        rope: index of its rotary embedding in `CausalLM.ropes`.
    """

    attention: Attention
    feed_forward: FeedForward
    rope: int


@dataclass(frozen=True, slots=True)
class CausalLM:
    """Bound layers and their configuration.

    Attributes:
        config: dimensions and conventions.
        context_length: tokens a sequence may have; decides longrope's factors.
        embedding: the token embedding.
        layers: in order.
        output_norm: weight of the last norm.
        head: makes logits; the embedding itself where the checkpoint has no other.
        ropes: for each different rotary embedding the angles per position, float64
            [rotary_dim / 2], and what cos and sin are multiplied by.
        kernels: what serves each operation.
    """

    config: ModelConfig
    context_length: int
    embedding: PackedWeight
    layers: tuple[Layer, ...]
    output_norm: Tensor
    head: Linear
    ropes: tuple[tuple[Tensor, float], ...]
    kernels: KernelTable

    @classmethod
    def bind(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        *,
        context_length: int | None = None,
        widen_weights: bool = False,
        kernels: KernelTable | None = None,
        on_tensor: Callable[[TensorInfo], None] | None = None,
    ) -> CausalLM:
        """Take every tensor of a checkpoint, packed, without copying the large ones.

        Args:
            checkpoint: open; may be closed afterwards, the map stays while it is used.
            config: read from it.
            context_length: tokens a sequence may have; `None`: what the model was trained for.
            widen_weights: keep a bf16 copy of packed matrices and compute with that.
            kernels: the dispatch table.
            on_tensor: called with each tensor as it is bound; what it raises ends the binding.

        Raises:
            CorruptCheckpointError: a tensor is missing, unused, or of the wrong shape.
        """
        kernels = kernels or KernelTable()
        context_length = context_length or config.context_length
        binder = Binder(checkpoint, kernels, widen=widen_weights, on_tensor=on_tensor)
        embedding = binder.matrix(EMBEDDING, config.vocab_size, config.embedding)
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        layers = tuple(
            Layer(
                bind_attention(binder, config, index),
                bind_feed_forward(binder, config, index),
                ropes.index(layer.rope),
            )
            for index, layer in enumerate(config.layers)
        )
        head = embedding
        if "output.weight" in binder:
            head = binder.matrix("output.weight", config.vocab_size, config.embedding)
        model = cls(
            config=config,
            context_length=context_length,
            embedding=embedding,
            layers=layers,
            output_norm=binder.vector("output_norm.weight", config.embedding),
            head=binder.linear(head),
            ropes=tuple(_bind_rope(binder, rope, context_length) for rope in ropes),
            kernels=kernels,
        )
        # Both sets of longrope's factors belong to the model, though one of them serves.
        for name in (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            binder.ignore(name)
        binder.finish()
        return model


def _bind_rope(binder: Binder, rope: RopeConfig, context_length: int) -> tuple[Tensor, float]:
    name = factors_name(rope, context_length)
    if rope.scaling == "longrope":
        return inverse_frequencies(rope, binder.vector(name, rope.rotary_dim // 2))
    return inverse_frequencies(rope, binder.optional_vector(name, rope.rotary_dim // 2))
