"""Rotary frequencies of every scaling kind are those of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.model.rope import (
    FREQUENCY_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    RopeConfig,
    cos_sin,
    factors_name,
    inverse_frequencies,
)
from tests.tiny_models import LLAMA3, ORIGINAL_CONTEXT, YARN, _llama3_factors, longrope

CONTEXT = 4 * ORIGINAL_CONTEXT


def expected(parameters: dict[str, Any], head_dim: int, length: int = CONTEXT) -> tuple[Any, float]:
    """transformers' inverse frequencies [head_dim / 2] and attention factor."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters=parameters,
    )
    if parameters["rope_type"] == "longrope":  # which reads it from here, as Phi-3's has it
        config.original_max_position_embeddings = ORIGINAL_CONTEXT
    run = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, scale = run(config, torch.device("cpu"), seq_len=length)
    return frequencies.double(), scale


def assert_equal(ours: tuple[torch.Tensor, float], theirs: tuple[Any, float]) -> None:
    assert ours[0].dtype == torch.float64
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=0)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
@pytest.mark.parametrize("base", [10000.0, 1e6])
def test_unscaled_frequencies_are_powers_of_the_base(head_dim: int, base: float) -> None:
    frequencies, scale = inverse_frequencies(RopeConfig(rotary_dim=head_dim, base=base))
    for i, frequency in enumerate(frequencies.tolist()):
        assert frequency == pytest.approx(base ** (-2 * i / head_dim), rel=1e-12)
    assert scale == 1.0


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("factor", [1.0, 2.5, 8.0])
def test_linear(head_dim: int, factor: float) -> None:
    rope = RopeConfig(rotary_dim=head_dim, base=10000.0, scaling="linear", factor=factor)
    parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor}
    assert_equal(inverse_frequencies(rope), expected(parameters, head_dim))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("betas", [(32.0, 1.0), (16.0, 2.0)])
@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
def test_yarn(head_dim: int, base: float, betas: tuple[float, float], factor: float) -> None:
    rope = RopeConfig(
        rotary_dim=head_dim,
        base=base,
        scaling="yarn",
        factor=factor,
        original_context=ORIGINAL_CONTEXT,
        beta_fast=betas[0],
        beta_slow=betas[1],
    )
    parameters = YARN | {"rope_theta": base, "factor": factor}
    parameters |= {"beta_fast": betas[0], "beta_slow": betas[1]}
    assert_equal(inverse_frequencies(rope), expected(parameters, head_dim))


def test_yarn_without_extrapolation_is_linear() -> None:
    common: dict[str, Any] = {"rotary_dim": 64, "base": 10000.0, "factor": 4.0}
    yarn = RopeConfig(**common, scaling="yarn", original_context=64, ext_factor=0.0)
    linear = inverse_frequencies(RopeConfig(**common, scaling="linear"))
    assert_equal(inverse_frequencies(yarn), linear)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_factors_divide_the_frequencies(head_dim: int, original: int) -> None:
    parameters = LLAMA3 | {"original_max_position_embeddings": original}
    factors = _llama3_factors(parameters, head_dim)
    rope = RopeConfig(rotary_dim=head_dim, base=10000.0)
    assert_equal(inverse_frequencies(rope, factors), expected(parameters, head_dim))
    assert factors_name(rope, 1 << 20) == FREQUENCY_FACTORS


@pytest.mark.parametrize("length", [ORIGINAL_CONTEXT, CONTEXT])
def test_longrope(length: int) -> None:
    parameters = longrope(8)
    scale = math.sqrt(1 + math.log(CONTEXT / ORIGINAL_CONTEXT) / math.log(ORIGINAL_CONTEXT))
    rope = RopeConfig(
        rotary_dim=16,
        base=10000.0,
        scaling="longrope",
        original_context=ORIGINAL_CONTEXT,
        attention_factor=scale,
    )
    name = factors_name(rope, length)
    assert name == (LONG_FACTORS if length > ORIGINAL_CONTEXT else SHORT_FACTORS)
    key = {LONG_FACTORS: "long_factor", SHORT_FACTORS: "short_factor"}[name]
    ours = inverse_frequencies(rope, torch.tensor(parameters[key]))
    assert_equal(ours, expected(parameters, 16, length))


def test_late_positions_keep_their_angles() -> None:
    frequencies, _ = inverse_frequencies(RopeConfig(rotary_dim=64, base=10000.0))
    positions = torch.tensor([0, 1, 131_071, 10_000_019])
    cos, sin = cos_sin(frequencies, 2.0, positions)
    assert cos.dtype == sin.dtype == torch.float32
    angles = np.outer(positions.numpy(), [10000.0 ** (-i / 32) for i in range(32)])
    np.testing.assert_allclose(cos.numpy(), 2 * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin.numpy(), 2 * np.sin(angles), atol=1e-6)
