"""Every field of the options refuses what it does not accept, and says what it accepts."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from asyncllm.errors import AsyncLLMError, OptionsError, RequestError
from asyncllm.options import EngineOptions, EngineOverrides, SamplingOverrides, SamplingParams

NAN, INF = math.nan, math.inf
HUGE = 10**400  # an int that no float holds
ENDLESS = 10**5000  # an int that Python will not print

# field: (values refused, words of the message beside the field's name)
ENGINE: dict[str, tuple[list[Any], list[str]]] = {
    "context_length": ([0, 1, -1, 1.5, True, "auto", ENDLESS], ["whole number from 2", "None"]),
    "max_seqs": ([0, 4097, None, 2.0, True, "8"], ["whole number from 1 to 4096"]),
    "block_tokens": ([0, 1025, None, "16"], ["whole number from 1 to 1024"]),
    "chunk": ([0, None, "AUTO", 1.0, (1 << 20) + 1], ["whole number from 1", '"auto"']),
    "chunk_budget_ms": ([0, -1.0, NAN, INF, None, "150", True, HUGE], ["milliseconds above 0"]),
    "kv_bytes": ([0, -1, None, 1e9, "all"], ["whole number from 1", '"auto"']),
    "kv_store": ([1, b"store", True, ""], ["a path or None"]),
    "kv_store_bytes": ([0, None, "auto", 1e9], ["whole number from 1"]),
    "kv_store_mode": (["w", None, "RW", ["rw"]], ['"rw", "ro"']),
    "kv_store_reset": ([1, None, "yes"], ["True or False"]),
    "kv_dtype": (["int4", None, np.array(["int8", "auto"])], ['"auto"', '"int8"', '"bfloat16"']),
    "prefix_cache": ([0, None], ["True or False"]),
    "prefill_weights": (["int4", None], ['"auto", "packed", "int8"']),
    "moe_residency_bytes": ([-1, None, 0.5, "all"], ["whole number from 0", '"auto"']),
    "device": (
        ["gpu", None, "cuda:", "cuda:-1", "cpu\n", "CPU", 0, "cuda:\u0663"],
        ['"auto"', '"cpu"', '"cuda"', '"cuda:N"'],
    ),
    "dtype": (["f32", None, ["auto"], "int8"], ['"auto"', '"float32"', '"bfloat16"', '"float16"']),
    "deterministic": ([1, None], ["True or False"]),
    "widen_weights": ([1, "no"], ["True or False"]),
    "threads": ([0, -2, 1025, 2.0, True], ["whole number from 1", "None"]),
    "tune_dir": ([1, b"dir", ""], ["a path or None"]),
    "max_waiting": ([-1, 1.0, True, "none"], ["whole number from 0", "None"]),
}
SAMPLING: dict[str, tuple[list[Any], list[str]]] = {
    "max_tokens": ([0, -1, 1.0, True, "16", 1 << 63], ["whole number from 1", "None"]),
    "min_tokens": ([-1, None, 1.0, ENDLESS], ["whole number from 0"]),
    "temperature": ([-0.1, NAN, INF, "1", True, HUGE, -HUGE], ["number from 0", "None"]),
    "top_k": ([-2, 1.0, True, "40"], ["whole number from -1", "None"]),
    "top_p": ([0, -0.1, 1.1, NAN, "1", True], ["number above 0.0 to 1.0", "None"]),
    "min_p": ([-0.1, 1.1, NAN, INF], ["number from 0.0 to 1.0", "None"]),
    "typical_p": ([0.0, 1.5, None, NAN], ["number above 0.0 to 1.0"]),
    "repetition_penalty": ([0, -1.0, NAN, INF, HUGE], ["number above 0", "None"]),
    "presence_penalty": ([NAN, INF, -INF, None, "0", HUGE], ["a number"]),
    "frequency_penalty": ([NAN, INF, None, True], ["a number"]),
    "seed": ([-1, 1 << 64, 1.0, True, "42"], [f"whole number from 0 to {2**64 - 1}", "None"]),
    "stop": ([5, b"x", [""], "", ["a", 1], [None]], ["strings", "none empty"]),
    "stop_token_ids": ([[-1], [1.0], [True], "12", 7, ["1"]], ["token ids", "from 0"]),
    "include_stop_str_in_output": ([1, None], ["True or False"]),
    "ignore_eos": ([0, None], ["True or False"]),
    "skip_special_tokens": ([1, "yes"], ["True or False"]),
    "logprobs": ([-1, True, 1.0, "5"], ["whole number from 0", "None"]),
    "prompt_logprobs": ([-1, True, 1.0], ["whole number from 0", "None"]),
    "n": ([0, -1, None, 1.0, True], ["whole number from 1"]),
    "logit_bias": (
        [{-1: 1.0}, {1: NAN}, {1: INF}, {1: "x"}, {"1": 1.0}, {1: True}, {1: HUGE}, [1], {1.0: 2}],
        ["token ids", "from 0", "numbers"],
    ),
    "bad_words": ([[""], 3, [b"x"]], ["strings", "none empty"]),
    "logits_processors": ([[3], print, "x", [None]], ["callables (ids, logits) -> logits"]),
    "structured": ([{"type": "object"}, "a|b"], ["not yet available"]),
}


def cases(table: dict[str, tuple[list[Any], list[str]]]) -> list[Any]:
    return [
        pytest.param(name, value, words, id=f"{name}-{number}")
        for name, (values, words) in table.items()
        for number, value in enumerate(values)
    ]


def names(of: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(of)}


@pytest.mark.parametrize(("name", "value", "words"), cases(ENGINE))
def test_engine_options_refuse_bad_values(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(OptionsError) as caught:
        EngineOptions(**{name: value})
    assert isinstance(caught.value, AsyncLLMError)
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert all(word in message for word in words), message
    assert len(message) < 500


@pytest.mark.parametrize(("name", "value", "words"), cases(SAMPLING))
def test_sampling_params_refuse_bad_values(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith((f"{name}=", f"{name}:"))
    assert all(word in message for word in words), message
    assert len(message) < 500


def test_the_tables_above_miss_no_field() -> None:
    assert set(ENGINE) == names(EngineOptions)
    assert set(SAMPLING) == names(SamplingParams)


def test_overrides_are_typed_as_the_fields_are() -> None:
    for options, overrides in (
        (EngineOptions, EngineOverrides),
        (SamplingParams, SamplingOverrides),
    ):
        tensor = {"Tensor": Any}
        fields = get_type_hints(options, localns=tensor)
        assert get_type_hints(overrides, localns=tensor) == fields


@pytest.mark.parametrize(
    "good",
    [
        {"context_length": 2, "max_seqs": 4096, "block_tokens": 1024, "chunk": 7},
        {"chunk_budget_ms": 1, "kv_bytes": 1 << 40, "moe_residency_bytes": 0, "max_waiting": 0},
        {"kv_store": Path("store"), "tune_dir": "dir", "kv_store_mode": "ro"},
        {"device": "cuda:11", "dtype": "bfloat16", "kv_dtype": "int8", "threads": 1024},
    ],
)
def test_engine_options_keep_good_values(good: dict[str, Any]) -> None:
    options = EngineOptions(**good)
    assert {name: getattr(options, name) for name in good} == good


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "typical_p": 1e-9},
        {"temperature": 1e-9, "top_k": 1 << 31, "seed": (1 << 64) - 1, "min_tokens": 4},
        {"presence_penalty": -2.0, "frequency_penalty": 2, "repetition_penalty": 1e-3},
        {"logit_bias": {0: -INF, 5: 100}, "logprobs": 0, "prompt_logprobs": 1 << 40, "n": 9},
    ],
)
def test_sampling_params_keep_good_values(good: dict[str, Any]) -> None:
    params = SamplingParams(**good)
    assert {name: getattr(params, name) for name in good} == good


def test_min_tokens_may_reach_but_not_pass_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(RequestError, match="min_tokens=5: accepted is at most max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_string_is_a_sequence_of_one() -> None:
    params = SamplingParams(stop="END", bad_words="x")
    assert params.stop == ("END",)
    assert params.bad_words == ("x",)


def test_sequences_and_mappings_are_copied() -> None:
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[3] = 4.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 2.0})


def test_options_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions().max_seqs = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 3  # type: ignore[misc]


def test_updated_replaces_and_checks() -> None:
    options = EngineOptions(max_seqs=3).updated({"chunk": 64})
    assert (options.max_seqs, options.chunk) == (3, 64)
    with pytest.raises(OptionsError, match="max_seqs=0"):
        options.updated({"max_seqs": 0})
    with pytest.raises(OptionsError, match="max_seq: no such option; known are block_tokens"):
        options.updated({"max_seq": 1})
    params = SamplingParams(top_k=3).updated({"stop": "x"})
    assert (params.top_k, params.stop) == (3, ("x",))
    with pytest.raises(RequestError, match="top_p=2"):
        params.updated({"top_p": 2})
    with pytest.raises(RequestError, match="topp: no such sampling parameter; known are bad_words"):
        params.updated({"topp": 1})


def test_the_checkpoints_defaults_fill_what_was_not_set() -> None:
    given = SamplingParams(top_k=5)
    resolved = given.resolved({"top_k": 64, "top_p": 0.95, "temperature": 1.0})
    assert (resolved.top_k, resolved.top_p, resolved.temperature) == (5, 0.95, 1.0)
    assert (resolved.min_p, resolved.repetition_penalty) == (0.0, 1.0)
    assert given.top_p is None


def test_without_defaults_a_request_is_greedy_and_unfiltered() -> None:
    resolved = SamplingParams().resolved({})
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.0, 0, 1.0)
    assert (resolved.min_p, resolved.repetition_penalty) == (0.0, 1.0)


def test_making_options_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from asyncllm.options import EngineOptions, SamplingParams\n"
        "EngineOptions(), SamplingParams(logits_processors=[print])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
