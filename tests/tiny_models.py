"""Tiny random `transformers` models, and GGUF files of them as the real converter makes them.

transformers is imported in here only, and only when a model is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

VOCABULARY = 101
CONTEXT = 256
ORIGINAL_CONTEXT = 64

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.5 * i for i in range(pairs)],
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }


@dataclass(frozen=True)
class Tiny:
    """What to build.

    Attributes:
        family: prefix of the transformers classes, as `"Llama"`.
        arch: `general.architecture`.
        changes: fields of the configuration that differ from the common ones.
        metadata: keys, without the architecture, that the converter would not write itself.
    """

    family: str
    arch: gguf.MODEL_ARCH
    changes: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


_A = gguf.MODEL_ARCH
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 24,
    "tie_word_embeddings": True,
}

TINY_MODELS: dict[str, Tiny] = {
    "llama": Tiny("Llama", _A.LLAMA),
    "llama-tied-one-kv-head": Tiny(
        "Llama", _A.LLAMA, {"tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "llama-biases": Tiny("Llama", _A.LLAMA, {"attention_bias": True}),
    "llama-linear": Tiny("Llama", _A.LLAMA, {"rope_parameters": LINEAR}),
    "llama-llama3": Tiny("Llama", _A.LLAMA, {"rope_parameters": LLAMA3}),
    "mistral": Tiny("Mistral", _A.LLAMA, {"sliding_window": 24, "head_dim": 24}),
    "mistral-wide": Tiny("Mistral", _A.LLAMA, {"sliding_window": 24, "head_dim": 32}),
    "qwen2": Tiny("Qwen2", _A.QWEN2, {"tie_word_embeddings": True}),
    "qwen2-yarn": Tiny("Qwen2", _A.QWEN2, {"rope_parameters": YARN}),
    "qwen3": Tiny("Qwen3", _A.QWEN3, {"head_dim": 32}),
    "qwen3-yarn": Tiny("Qwen3", _A.QWEN3, {"head_dim": 32, "rope_parameters": YARN}),
    "gemma2": Tiny(
        "Gemma2",
        _A.GEMMA2,
        _GEMMA
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Tiny(
        "Gemma3",
        _A.GEMMA3,
        _GEMMA
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "phi3": Tiny("Phi3", _A.PHI3, {"sliding_window": 24}),
    "phi3-partial": Tiny(
        "Phi3",
        _A.PHI3,
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "phi3-longrope": Tiny(
        "Phi3",
        _A.PHI3,
        {
            "rope_parameters": longrope(8),
            "original_max_position_embeddings": ORIGINAL_CONTEXT,
        },
    ),
}


def build(tiny: Tiny, seed: int = 0) -> Any:
    """A random model in float32, eager attention, weights large enough to tell errors."""
    import transformers

    name = {"Gemma3": "Gemma3Text"}.get(tiny.family, tiny.family)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{name}Config")(**(common | dict(tiny.changes)))
    model = getattr(transformers, f"{tiny.family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(1.5 * noise / math.sqrt(parameter.shape[1]))
    return model


def write_gguf(
    model: Any,
    tiny: Tiny,
    path: Path,
    *,
    skip: frozenset[str] = frozenset(),
    tokenizer: bool = False,
) -> Path:
    """Write a model as the GGUF converter would, all tensors F32 but those in `skip`.

    With a tokenizer, of one character a token, a whole engine can load it.
    """
    config = model.config
    arch = gguf.MODEL_ARCH_NAMES[tiny.arch]
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    window = getattr(config, "sliding_window", None)
    if window:
        writer.add_sliding_window(window)
    if tiny.arch == _A.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    extra = _add_rope(writer, config, head_dim)
    for key, value in tiny.metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(
            f"{arch}.{key}", value
        )
    if tokenizer:
        letters = [chr(0x4E00 + token) for token in range(3, VOCABULARY)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *letters])
        writer.add_token_scores([0.0] * VOCABULARY)
        writer.add_token_types([2, 3, 3, *[1] * len(letters)])
    for name, tensor in (_tensors(model, tiny) | extra).items():
        if name not in skip:
            writer.add_tensor(name, np.ascontiguousarray(tensor.detach().numpy(), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any, tiny: Tiny) -> dict[str, Tensor]:
    config = model.config
    names = gguf.get_tensor_name_map(tiny.arch, config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if tiny.arch == _A.LLAMA and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = _neighbouring_pairs(tensor, heads)
        if tiny.arch in (_A.GEMMA2, _A.GEMMA3) and name.endswith("norm.weight"):
            tensor = tensor + 1
        found[target] = tensor
    return found


def _neighbouring_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Rotary pairs (i, i + half) of each head become rows (2i, 2i + 1)."""
    pairs = tensor.view(heads, 2, -1, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _add_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> dict[str, Tensor]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    rotary_dim = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind, factor = rope["rope_type"], rope.get("factor")
    original = rope.get("original_max_position_embeddings")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(original)
    elif kind == "longrope":
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        return {
            "rope_factors_long.weight": torch.tensor(rope["long_factor"]),
            "rope_factors_short.weight": torch.tensor(rope["short_factor"]),
        }
    elif kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(rope, rotary_dim)}
    return {}


def _llama3_factors(rope: Mapping[str, Any], rotary_dim: int) -> Tensor:
    """What the converter works out from Llama 3's scaling."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, rotary_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / rotary_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)


class Tinies:
    """Tiny models by name, each made once: the transformers model and its GGUF file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._get = cache(self._made)

    def path(self, name: str) -> Path:
        return self._get(name)[1]

    def logits(self, name: str, tokens: Sequence[int]) -> Tensor:
        """transformers' logits of every position, without its cache."""
        with torch.no_grad():
            logits: Tensor = self._get(name)[0](torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    def _made(self, name: str) -> tuple[Any, Path]:
        model = build(TINY_MODELS[name])
        return model, write_gguf(model, TINY_MODELS[name], self._directory / f"{name}.gguf")


def allocated_bytes(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes of torch's CPU allocations while it runs: their sum, and the most held at once."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = most = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        held += nbytes
        most = max(most, held)
    return sum(nbytes for _, nbytes in events if nbytes > 0), most
