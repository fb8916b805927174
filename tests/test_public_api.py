"""The public surface: names that applications may rely on."""

from __future__ import annotations

import dataclasses
import inspect

import asyncllm

NAMES = {
    "AsyncEngine",
    "AsyncLLMError",
    "Choice",
    "Chunk",
    "Completion",
    "CorruptCheckpointError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "Generation",
    "LoadProgress",
    "LoadStage",
    "Logprob",
    "ModelInfo",
    "ModelLoadError",
    "OptionsError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "StoreError",
    "Timings",
    "Tokenizer",
    "UnsupportedModelError",
    "Usage",
    "__version__",
}


def names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_package_exports_exactly_the_public_names() -> None:
    assert set(asyncllm.__all__) == NAMES
    assert all(hasattr(asyncllm, name) for name in NAMES)


def test_results_have_the_fields_of_the_contract() -> None:
    assert names(asyncllm.Chunk) == {"text", "token_ids", "logprobs", "index", "finish_reason"}
    assert names(asyncllm.Usage) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert names(asyncllm.Timings) == {"queued_s", "prefill_s", "first_token_s", "total_s"}
    assert names(asyncllm.Completion) >= {
        *("request_id", "text", "token_ids", "finish_reason", "stop", "logprobs"),
        *("usage", "timings", "choices"),
    }
    assert names(asyncllm.EngineStats) >= {
        *("waiting", "running", "prefilling", "decoding", "admitted", "preempted", "resumed"),
        *("finished", "cancelled", "failed", "steps", "kv_blocks_total", "kv_blocks_used"),
        *("kv_blocks_cached", "kv_blocks_free", "kv_pool_bytes", "kv_pool_growths"),
        *("prefix_hit_tokens", "store_hit_blocks", "store_written_blocks"),
        *("store_rejected_blocks", "store_dropped_blocks", "store_faults", "decode_mode"),
        *("decode_mode_reason", "launch_failures", "weights_bytes", "expert_bytes_resident"),
        *("expert_bytes_streamed", "expert_hit_rate"),
    }


def test_overrides_are_typed_by_the_fields_of_their_dataclass() -> None:
    from asyncllm.options import EngineOverrides, SamplingOverrides

    assert set(EngineOverrides.__annotations__) == names(asyncllm.EngineOptions)
    assert set(SamplingOverrides.__annotations__) == names(asyncllm.SamplingParams)


def test_errors_have_the_bases_of_the_contract() -> None:
    for name in NAMES:
        value = getattr(asyncllm, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            assert issubclass(value, asyncllm.AsyncLLMError)
    assert issubclass(asyncllm.OptionsError, ValueError)
    assert issubclass(asyncllm.RequestError, ValueError)
    assert issubclass(asyncllm.PromptTooLongError, asyncllm.RequestError)
    assert issubclass(asyncllm.UnsupportedModelError, asyncllm.ModelLoadError)
    assert issubclass(asyncllm.CorruptCheckpointError, asyncllm.ModelLoadError)


def test_every_field_of_a_public_dataclass_is_documented() -> None:
    for name in NAMES:
        value = getattr(asyncllm, name)
        if dataclasses.is_dataclass(value) and isinstance(value, type):
            text = value.__doc__ or ""
            missing = [field for field in names(value) if f"{field}:" not in text]
            assert not missing, f"{name} does not document {missing}"
