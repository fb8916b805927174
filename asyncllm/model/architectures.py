"""What differs between model families, as data: one row a family, read by one `CausalLM`.

A new family is a new row; only what no row can say yet needs code. The rows describe the GGUF form
of a family, which is not always the original one: converting to GGUF permutes the q and k rows of
`llama` (so that rotary pairs are neighbours), stores Gemma's norm weights plus one, and leaves
Phi-3's projections fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from asyncllm.errors import UnsupportedModelError

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model family.

    Attributes:
        name: `general.architecture`.
        interleaved_rope: rotary pairs are elements 2i and 2i+1; otherwise i and i + half.
        activation: of the gate in the feed-forward.
        post_norms: norms after attention and feed-forward too, before the residual is added.
        qk_norm: an RMSNorm over each head of q and k, before the rotary embedding.
        scaled_embedding: embeddings are multiplied by the square root of their width.
        fused_qkv: q, k and v are one tensor, in this order.
        fused_gate_up: gate and up are one tensor, in this order.
        biases: projections that have a bias.
        optional_biases: projections that may have one.
        full_attention_every: of so many layers the last attends without window; 0: with a
            window in the checkpoint, all layers have it; `None`: no layer has one.
        default_window: where the checkpoint does not say.
        local_rope_base: rope base of windowed layers, which then have no rope scaling either.
        attention_softcap: where the checkpoint does not say; 0 is none.
        final_softcap: likewise, for the logits.
        wide_query_layers: number of layers of the one size whose queries are scaled by the width
            of the embedding per head instead of the head's own.
    """

    name: str
    interleaved_rope: bool = False
    activation: Activation = "silu"
    post_norms: bool = False
    qk_norm: bool = False
    scaled_embedding: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    biases: frozenset[str] = frozenset()
    optional_biases: frozenset[str] = frozenset()
    full_attention_every: int | None = None
    default_window: int | None = None
    local_rope_base: float | None = None
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    wide_query_layers: int | None = None


def _table(*rows: Architecture) -> Mapping[str, Architecture]:
    return MappingProxyType({row.name: row for row in rows})


ARCHITECTURES: Final = _table(
    # Mistral is llama with a window over all layers, in GGUF as elsewhere.
    Architecture(
        name="llama",
        interleaved_rope=True,
        optional_biases=frozenset({"attn_q", "attn_k", "attn_v", "attn_output"}),
        full_attention_every=0,
    ),
    Architecture(name="qwen2", biases=frozenset({"attn_q", "attn_k", "attn_v"})),
    Architecture(name="qwen3", qk_norm=True),
    Architecture(
        name="gemma2",
        activation="gelu_tanh",
        post_norms=True,
        scaled_embedding=True,
        full_attention_every=2,
        default_window=4096,
        attention_softcap=50.0,
        final_softcap=30.0,
        wide_query_layers=46,
    ),
    Architecture(
        name="gemma3",
        activation="gelu_tanh",
        post_norms=True,
        qk_norm=True,
        scaled_embedding=True,
        full_attention_every=6,
        local_rope_base=10000.0,
        wide_query_layers=62,
    ),
    Architecture(name="phi3", fused_qkv=True, fused_gate_up=True, full_attention_every=0),
)


def find_architecture(name: str) -> Architecture:
    """The row of a family.

    Raises:
        UnsupportedModelError: naming it and listing what is known.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"general.architecture {name!r} is not known here; "
            f"known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]
