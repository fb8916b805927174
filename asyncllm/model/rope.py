"""Rotary embedding: inverse frequencies of every scaling kind, and cos and sin of positions.

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753); Llama 3's scaling
comes as divisors of the frequencies in `rope_freqs.weight`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

SCALINGS: Final = ("none", "linear", "yarn", "longrope")

# Divisors of the frequencies, float [rotary_dim / 2].
FREQUENCY_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotary embedding of some layers.

    Attributes:
        rotary_dim: leading elements of a head that are rotated; even.
        base: the frequencies are base ** (-2i / rotary_dim).
        scaling: one of `SCALINGS`.
        factor: by how much the context is stretched.
        original_context: tokens before stretching.
        attention_factor: multiplies cos and sin, on top of what the kind of scaling asks for.
        ext_factor: how far yarn keeps high frequencies: 0 stretches all alike.
        beta_fast: turns within the original context from which yarn keeps a frequency.
        beta_slow: turns up to which it stretches one fully.
    """

    rotary_dim: int
    base: float
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    ext_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def is_scaled(self) -> bool:
        return self.scaling != "none"


def factors_name(rope: RopeConfig, context_length: int) -> str:
    """The tensor whose factors divide the frequencies, where a checkpoint has it.

    With longrope the engine's context length decides once, at load, which set serves all
    positions: the long one if a sequence may pass the original context. A sequence can then never
    change sets midway, which would make the K it has cached wrong, and a sequence's tokens do not
    depend on how long it will get.
    """
    if rope.scaling != "longrope":
        return FREQUENCY_FACTORS
    return LONG_FACTORS if context_length > rope.original_context else SHORT_FACTORS


def inverse_frequencies(rope: RopeConfig, factors: Tensor | None = None) -> tuple[Tensor, float]:
    """Angles per position, float64 [rotary_dim / 2], and what cos and sin are multiplied by.

    Args:
        rope: the embedding.
        factors: divisors of the frequencies, [rotary_dim / 2].
    """
    import torch

    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    frequencies = rope.base**-exponents
    if factors is not None:
        frequencies = frequencies / factors.double()
    if rope.scaling == "linear":
        return frequencies / rope.factor, rope.attention_factor
    if rope.scaling == "yarn":
        kept = _yarn_kept(rope) * rope.ext_factor
        stretched = frequencies / rope.factor
        # The paper's temperature, on q and k alike; only where frequencies are really mixed.
        mixed = rope.ext_factor != 0 and rope.factor > 1
        temperature = 0.1 * math.log(rope.factor) + 1.0 if mixed else 1.0
        return stretched * (1 - kept) + frequencies * kept, rope.attention_factor * temperature
    return frequencies, rope.attention_factor


def _yarn_kept(rope: RopeConfig) -> Tensor:
    """For each frequency how much of it stays, 1 to 0, float64 [rotary_dim / 2]."""
    import torch

    def pair_that_turns(turns: float) -> float:
        wavelength = rope.original_context / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.base))

    low = max(0, math.floor(pair_that_turns(rope.beta_fast)))
    high = min(rope.rotary_dim - 1, math.ceil(pair_that_turns(rope.beta_slow)))
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    return 1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)


def cos_sin(frequencies: Tensor, scale: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for a step's rows, float32 [rows, rotary_dim / 2] each, worked out in float64.

    They are made anew each step: a table of every position would be larger than some models'
    layers, and the angles of late positions need float64 anyway.
    """
    angles = positions.double().unsqueeze(1) * frequencies
    return (angles.cos() * scale).float(), (angles.sin() * scale).float()
