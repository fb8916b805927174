"""Checkpoints of real models' shapes with random weights: for measuring, where no real one is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CONTEXT: Final = 131072


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama-shaped model.

    Attributes:
        layers: decoder layers.
        embedding: width of the residual stream.
        feed_forward: width inside the feed-forward.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocabulary: tokens.
        tied: the head is the embedding.
        mixed: matrices are Q4_K, some Q6_K, as llama.cpp's Q4_K_M has them; else all are BF16.
    """

    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    mixed: bool = True


SHAPES: Final = {
    "llama-8b-q4_k_m": Shape(32, 4096, 14336, 32, 8, 128, 128256, False),
    "llama-1b-q4_k_m": Shape(16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-8b-bf16": Shape(32, 4096, 14336, 32, 8, 128, 128256, False, mixed=False),
    "tiny-q4_k_m": Shape(2, 512, 1024, 8, 2, 64, 1024, False),
}


def write(name: str, path: Path) -> None:
    """Write one of `SHAPES` as a GGUF file: valid random blocks, ids as its only texts.

    Raises:
        KeyError: no such shape.
    """
    import gguf
    import numpy as np

    shape = SHAPES[name]
    chance = np.random.default_rng(1)
    formats = gguf.GGMLQuantizationType
    q4, q6 = (formats.Q4_K, formats.Q6_K) if shape.mixed else (formats.BF16, formats.BF16)
    pools = {kind: _blocks(kind.name, chance) for kind in {q4, q6}}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(CONTEXT)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.embedding)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = [f"t{number}" for number in range(shape.vocabulary)]
    tokens[1:3] = ["t", "0"]  # what the one merge is made of
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocabulary)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)

    def matrix(tensor: str, rows: int, columns: int, kind: Any) -> None:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        wanted, pool = rows * columns // elements * size, pools[kind]
        data = np.resize(np.roll(pool, size * int(chance.integers(1000))), wanted)
        writer.add_tensor(tensor, data.reshape(rows, -1), raw_dtype=kind)

    def norm(tensor: str) -> None:
        writer.add_tensor(tensor, np.ones(shape.embedding, np.float32))

    width, inner = shape.embedding, shape.feed_forward
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrix("token_embd.weight", shape.vocabulary, width, q6 if shape.tied else q4)
    norm("output_norm.weight")
    if not shape.tied:
        matrix("output.weight", shape.vocabulary, width, q6)
    for layer in range(shape.layers):
        eighth = shape.layers // 8
        more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        prefix = f"blk.{layer}."
        norm(prefix + "attn_norm.weight")
        matrix(prefix + "attn_q.weight", q_width, width, q4)
        matrix(prefix + "attn_k.weight", kv_width, width, q4)
        matrix(prefix + "attn_v.weight", kv_width, width, q6 if more else q4)
        matrix(prefix + "attn_output.weight", width, q_width, q4)
        norm(prefix + "ffn_norm.weight")
        matrix(prefix + "ffn_gate.weight", inner, width, q4)
        matrix(prefix + "ffn_up.weight", inner, width, q4)
        matrix(prefix + "ffn_down.weight", width, inner, q6 if more else q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(name: str, chance: Any) -> Any:
    """Some 30 MB of valid blocks whose weights are about as large as a trained model's."""
    import numpy as np

    count = 1 << 17
    if name == "BF16":
        values = (chance.standard_normal(256 * count // 2) * 0.02).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    size = {"Q4_K": 144, "Q6_K": 210}[name]
    blocks = chance.integers(0, 256, (count, size), dtype=np.uint8)
    scale = chance.uniform(0.5, 1.5, count) * 1e-4
    if name == "Q4_K":
        halves = np.stack([scale, scale * 7.5], 1).astype(np.float16)
        blocks[:, :4] = halves.view(np.uint8)
    else:
        blocks[:, 192:208] &= 63
        blocks[:, 208:] = (scale * 0.3).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(-1)
