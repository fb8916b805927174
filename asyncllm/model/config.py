"""`ModelConfig`: a model's dimensions and conventions, read from the checkpoint's metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from asyncllm.errors import CorruptCheckpointError, UnsupportedModelError
from asyncllm.model.architectures import Architecture, find_architecture
from asyncllm.model.rope import LONG_FACTORS, SCALINGS, SHORT_FACTORS, RopeConfig

if TYPE_CHECKING:
    from asyncllm.checkpoint.checkpoint import Checkpoint

T = TypeVar("T", int, float, str)

EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What one layer has of its own.

    Attributes:
        window: tokens a query sees, itself included; `None`: all.
        rope: its rotary embedding; layers with equal ones share the tables.
    """

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and conventions of one model.

    Attributes:
        architecture: what its family does.
        layers: one entry a layer.
        embedding: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: width of a head of q, k and v.
        feed_forward: width inside the feed-forward.
        vocab_size: rows of the embedding, columns of the logits.
        context_length: tokens it was trained for.
        norm_eps: added to the mean square in every RMSNorm.
        query_scale: multiplies q before the dot products.
        attention_softcap: scores s become c * tanh(s / c); 0: they stay.
        final_softcap: likewise for logits.
        embedding_scale: multiplies the embeddings.
    """

    architecture: Architecture
    layers: tuple[LayerConfig, ...]
    embedding: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab_size: int
    context_length: int
    norm_eps: float
    query_scale: float
    attention_softcap: float
    final_softcap: float
    embedding_scale: float

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Read and check the configuration of a checkpoint.

        Raises:
            UnsupportedModelError: the architecture, or something it asks for, is not known here.
            CorruptCheckpointError: naming the key and its value, or the key that is missing.
        """
        architecture = find_architecture(checkpoint.architecture)
        read = _Metadata(checkpoint, architecture.name)
        if read.whole("expert_count", default=0, low=0) > 0:
            raise UnsupportedModelError(
                f"{read.key('expert_count')} is {read.whole('expert_count')}: "
                "mixtures of experts are not supported"
            )
        embedding = read.whole("embedding_length")
        heads = read.whole("attention.head_count")
        kv_heads = read.whole("attention.head_count_kv", default=heads)
        if heads % kv_heads:
            raise read.wrong(
                "attention.head_count", f"a multiple of the {kv_heads} key and value heads"
            )
        if "attention.key_length" not in read and embedding % heads:
            raise read.wrong("embedding_length", f"a multiple of the {heads} heads")
        head_dim = read.whole("attention.key_length", default=embedding // heads)
        value_dim = read.whole("attention.value_length", default=embedding // heads)
        if value_dim != head_dim:
            raise UnsupportedModelError(
                f"heads of width {head_dim} in keys and {value_dim} in values are not supported"
            )
        count = read.whole("block_count", high=1 << 16)
        context_length = read.whole("context_length")
        wide = count == architecture.wide_query_layers
        scale = 1.0 / math.sqrt(embedding / heads if wide else head_dim)
        return cls(
            architecture=architecture,
            layers=_layers(read, architecture, count, head_dim, context_length),
            embedding=embedding,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            feed_forward=read.whole("feed_forward_length"),
            vocab_size=_vocab_size(checkpoint),
            context_length=context_length,
            norm_eps=read.real("attention.layer_norm_rms_epsilon", high=1.0),
            query_scale=read.real("attention.scale", default=scale),
            attention_softcap=read.softcap("attn", architecture.attention_softcap),
            final_softcap=read.softcap("final", architecture.final_softcap),
            embedding_scale=math.sqrt(embedding) if architecture.scaled_embedding else 1.0,
        )


def _vocab_size(checkpoint: Checkpoint) -> int:
    info = checkpoint.tensors.get(EMBEDDING)
    if info is None:
        raise CorruptCheckpointError(f"{checkpoint.path}: tensor {EMBEDDING!r} is missing")
    return info.rows


def _layers(
    read: _Metadata, architecture: Architecture, count: int, head_dim: int, context_length: int
) -> tuple[LayerConfig, ...]:
    rope = _rope(read, head_dim, context_length)
    every = architecture.full_attention_every
    window = None
    if every is not None:
        # Some converters write 0 for "none".
        window = read.whole("attention.sliding_window", architecture.default_window or 0, low=0)
    if not window:
        return (LayerConfig(None, rope),) * count
    local = rope
    if architecture.local_rope_base is not None:
        base = read.real("rope.freq_base_swa", default=architecture.local_rope_base)
        local = RopeConfig(rotary_dim=rope.rotary_dim, base=base)
    windowed, full = LayerConfig(window, local), LayerConfig(None, rope)
    pattern = "attention.sliding_window_pattern"
    if isinstance(read.get(pattern), int):
        every = read.whole(pattern, low=0)
    elif pattern in read:
        return tuple(windowed if flag else full for flag in read.flags(pattern, count))
    return tuple(full if every and (i + 1) % every == 0 else windowed for i in range(count))


def _rope(read: _Metadata, head_dim: int, context_length: int) -> RopeConfig:
    rotary_dim = read.whole("rope.dimension_count", default=head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise read.wrong(
            "rope.dimension_count", f"an even number up to the head's width {head_dim}", rotary_dim
        )
    scaling = read.text("rope.scaling.type", default="none")
    factor = read.real("rope.scaling.factor", default=1.0)
    if "rope.scaling.type" not in read and "rope.scale_linear" in read:  # files before 2023-11
        scaling, factor = "linear", read.real("rope.scale_linear")
    if {LONG_FACTORS, SHORT_FACTORS} & set(read.checkpoint.tensors):
        scaling = "longrope"  # the converter writes the factors, but no type
    if scaling not in SCALINGS:
        raise UnsupportedModelError(
            f"{read.key('rope.scaling.type')} {scaling!r} is not known here; "
            f"known are {', '.join(SCALINGS)}"
        )
    return RopeConfig(
        rotary_dim=rotary_dim,
        base=read.real("rope.freq_base", default=10000.0),
        scaling=scaling,
        factor=factor,
        original_context=read.whole("rope.scaling.original_context_length", default=context_length),
        attention_factor=read.real("rope.scaling.attn_factor", default=1.0)
        * read.real("rope.scaling.yarn_attn_factor", default=1.0),
        ext_factor=read.real("rope.scaling.yarn_ext_factor", default=1.0, low=-1.0),
        beta_fast=read.real("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=read.real("rope.scaling.yarn_beta_slow", default=1.0),
    )


class _Metadata:
    """Checked values of the keys that begin with the architecture's name."""

    def __init__(self, checkpoint: Checkpoint, architecture: str) -> None:
        self.checkpoint = checkpoint
        self._architecture = architecture

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.checkpoint.metadata

    def key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def get(self, name: str) -> Any:
        return self.checkpoint.metadata.get(self.key(name))

    def wrong(self, name: str, expected: str, value: object = None) -> CorruptCheckpointError:
        found = self.get(name) if value is None else value
        return CorruptCheckpointError(
            f"{self.checkpoint.path}: metadata {self.key(name)!r} is {found!r}; "
            f"{expected} is expected"
        )

    def whole(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31
    ) -> int:
        value = self._read(name, int, default)
        # A default worked out from other keys must hold as well.
        if not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}", value)
        return value

    def real(
        self, name: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12
    ) -> float:
        value = self._read(name, float, default)
        if not low < value <= high:
            raise self.wrong(name, f"a number above {low:g} up to {high:g}", value)
        return value

    def softcap(self, name: str, default: float) -> float:
        value = self._read(f"{name}_logit_softcapping", float, default)
        if not 0 <= value <= 1e6:
            raise self.wrong(f"{name}_logit_softcapping", "a number from 0 to 1e6")
        return value

    def text(self, name: str, default: str) -> str:
        return self._read(name, str, default)

    def flags(self, name: str, count: int) -> list[bool]:
        value = self.get(name)
        if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != count:
            raise self.wrong(name, f"a number, or {count} flags, one a layer,")
        return [bool(flag) for flag in value]

    def _read(self, name: str, kind: type[T], default: T | None) -> T:
        key = self.key(name)
        if default is None:
            return self.checkpoint.get(key, kind)
        return self.checkpoint.get(key, kind, default)
