"""Which backend serves, on a machine that says it has a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm.errors import OptionsError
from asyncllm.model.architectures import find_architecture
from asyncllm.model.config import LayerConfig, ModelConfig
from asyncllm.model.rope import RopeConfig
from asyncllm.options import EngineOptions
from asyncllm.runner.backend import CudaBackend, choose_backend

pytest.importorskip("triton", reason="without triton no GPU is chosen")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


CONFIG = ModelConfig(
    architecture=find_architecture("llama"),
    layers=(LayerConfig(None, RopeConfig(rotary_dim=64, base=10000.0)),),
    embedding=128,
    heads=2,
    kv_heads=2,
    head_dim=64,
    feed_forward=256,
    vocab_size=100,
    context_length=1000,
    norm_eps=1e-5,
    query_scale=0.125,
    attention_softcap=0.0,
    final_softcap=0.0,
    embedding_scale=1.0,
)


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_a_gpu_serves_where_nothing_speaks_against_it(device: str) -> None:
    backend = choose_backend(EngineOptions(device=device))
    assert isinstance(backend, CudaBackend)
    assert backend.device == "cuda:0"
    assert backend.suit(CONFIG, 16) is backend


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"widen_weights": True},
        {"prefill_weights": "int8"},
        {"device": "cuda:3"},
    ],
)
def test_what_a_gpu_does_not_have_is_an_error_if_one_was_asked_for(options: Any) -> None:
    with pytest.raises(OptionsError, match="device='cuda"):
        choose_backend(EngineOptions(**({"device": "cuda"} | options)))


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    "options", [{"deterministic": True}, {"widen_weights": True}, {"device": "cpu"}]
)
def test_the_cpu_serves_what_a_gpu_does_not_have(options: Any) -> None:
    assert choose_backend(EngineOptions(**options)).device == "cpu"


@pytest.mark.usefixtures("a_gpu")
def test_a_shape_that_a_gpu_does_not_have_goes_to_the_cpu_with_a_note() -> None:
    odd = replace(CONFIG, embedding=144)
    backend = choose_backend(EngineOptions()).suit(odd, 16)
    assert backend.device == "cpu"
    assert "not on the GPU: embedding width 144 is no multiple of 32" in backend.notes
    with pytest.raises(OptionsError, match="embedding width 144"):
        choose_backend(EngineOptions(device="cuda")).suit(odd, 16)
