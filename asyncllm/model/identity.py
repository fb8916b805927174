"""A model's fingerprint: what has to be the same for K/V of one engine to serve another."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_128

from asyncllm.model.rope import factors_name

if TYPE_CHECKING:
    from asyncllm.checkpoint.checkpoint import Checkpoint
    from asyncllm.model.config import ModelConfig

# Of each tensor so many pieces of so many bytes are looked at, spread evenly: enough to tell
# weights apart, and little enough that a checkpoint of 100 GB takes a second from a cold disk.
PIECES: Final = 8
PIECE_BYTES: Final = 4096


def fingerprint(
    checkpoint: Checkpoint, config: ModelConfig, *, context_length: int, **settings: Any
) -> bytes:
    """16 bytes that differ where anything differs that gives K and V their meaning.

    They cover names, shapes, formats and a sample of the content of all weights, the tokenizer, the
    architecture with its rope and windows, and the settings.

    Args:
        checkpoint: open.
        config: read from it.
        context_length: tokens a sequence may have; it decides between sets of rope factors.
        **settings: what else matters, as the type of K and V and their layout in a block.
    """
    digest = xxh3_128()
    shape = asdict(config) | {
        "rope_factors": [factors_name(layer.rope, context_length) for layer in config.layers]
    }
    for part in (shape, settings):
        digest.update(json.dumps(part, sort_keys=True, default=sorted).encode())
    for key in sorted(checkpoint.metadata):
        if key.startswith("tokenizer."):
            digest.update(_pack(key, checkpoint.metadata[key]))
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.shape} {tensor.format.name}\n".encode())
        last = max(0, tensor.nbytes - PIECE_BYTES)
        for start in sorted({last * piece // (PIECES - 1) for piece in range(PIECES)}):
            digest.update(tensor.data[start : start + PIECE_BYTES].tobytes())
    return digest.digest()


def _pack(key: str, value: Any) -> bytes:
    if hasattr(value, "tobytes"):
        return key.encode() + bytes(value.tobytes())
    text = "\n".join(value) if isinstance(value, list) else repr(value)
    return f"{key}\n{text}\n".encode("utf-8", "surrogatepass")
