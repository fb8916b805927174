"""Which backend serves, on a machine that says it has a GPU."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, synthetic
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
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, FREE))


FREE = 8 << 30
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
    assert backend.deterministic is False


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_is_deterministic_if_that_is_asked_for() -> None:
    backend = choose_backend(EngineOptions(deterministic=True))
    assert isinstance(backend, CudaBackend)
    assert backend.deterministic is True


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    "options",
    [
        {"widen_weights": True},
        {"prefill_weights": "int8"},
        {"device": "cuda:3"},
    ],
)
def test_what_a_gpu_does_not_have_is_an_error_if_one_was_asked_for(options: Any) -> None:
    with pytest.raises(OptionsError, match="device='cuda"):
        choose_backend(EngineOptions(**({"device": "cuda"} | options)))


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("options", [{"widen_weights": True}, {"device": "cpu"}])
def test_the_cpu_serves_what_a_gpu_does_not_have(options: Any) -> None:
    assert choose_backend(EngineOptions(**options)).device == "cpu"


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("changes", "block_tokens", "weights_bytes", "reason"),
    [
        ({"embedding": 144}, 16, 0, "embedding width 144 is no multiple of 32"),
        ({"feed_forward": 336}, 16, 0, "feed-forward width 336 is no multiple of 32"),
        ({"head_dim": 24}, 16, 0, "head width 24 is no multiple of 16"),
        ({"head_dim": 16, "heads": 3, "kv_heads": 3}, 16, 0, "width of all heads 48 is no multip"),
        ({"head_dim": 512}, 16, 0, "head width 512 is above 256"),
        ({}, 24, 0, "block_tokens 24 is no multiple of 16"),
        ({"activation": "relu"}, 16, 0, "activation 'relu' has no kernel"),
        ({}, 16, FREE, f"its weights take {FREE} bytes, and {FREE} are free on the device"),
    ],
)
def test_a_model_that_a_gpu_cannot_serve_goes_to_the_cpu_and_the_reason_is_told(
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    block_tokens: int,
    weights_bytes: int,
    reason: str,
) -> None:
    if "activation" in changes:
        changes = {"architecture": replace(CONFIG.architecture, **changes)}
    odd = replace(CONFIG, **changes)
    with caplog.at_level(logging.DEBUG, "asyncllm"):
        backend = choose_backend(EngineOptions()).suit(odd, block_tokens, weights_bytes)
    assert backend.device == "cpu"
    assert any(f"not on the GPU: {reason}" in note for note in backend.notes)
    assert any(f"reason=not on the GPU: {reason}" in each.getMessage() for each in caplog.records)
    with pytest.raises(OptionsError, match=re.escape(reason)):
        choose_backend(EngineOptions(device="cuda")).suit(odd, block_tokens, weights_bytes)


@pytest.mark.usefixtures("a_gpu")
def test_the_note_is_part_of_what_the_engine_says_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "narrow.gguf"
    shape = synthetic.Shape(1, 256, 256, 4, 2, 24, 64, tied=False, mixed=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic.SHAPES, "narrow", shape)
        synthetic.write("narrow", path)

    async def notes() -> tuple[str, ...]:
        async with await AsyncEngine.load(path, context_length=64, threads=1) as engine:
            return engine.info.backend_notes

    assert "not on the GPU: head width 24 is no multiple of 16" in asyncio.run(notes())
