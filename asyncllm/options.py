"""What an application may set: `EngineOptions` once per engine, `SamplingParams` per request.

Nothing here imports torch or numpy; every check raises before anything else is touched.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict

from asyncllm.errors import OptionsError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
else:
    LogitsProcessor = Callable

StrPath = str | os.PathLike[str]

GIB = 1 << 30
CHUNK_MIN, CHUNK_MAX, CHUNK_MAX_GPU = 32, 512, 2048
MOST_PENALTY = 1e6  # logits are float32 and rarely beyond 100; more could only overflow
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
STRINGS = "a string or a sequence of strings, none empty"
TOKEN_IDS = "a sequence of token ids, whole numbers from 0"
PROCESSORS = "a sequence of callables (ids, logits) -> logits"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Whether it is an int or a float with a finite value as a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, or an object's own fault
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of one engine; all have defaults and are checked when the object is made.

    Attributes:
        context_length: tokens one sequence may hold, prompt and output together; `None` takes the
            model's own, capped by what the K/V budget allows.
        max_seqs: sequences that run at once.
        block_tokens: tokens in one K/V block.
        chunk: prompt tokens a step may advance, over all requests; `"auto"` learns it in 32 to 512,
            on a GPU takes up to 2048 where no layer has a window.
        chunk_budget_ms: milliseconds a prompt chunk may pause sequences that are decoding.
        kv_bytes: bytes of the K/V pool at most; `"auto"` takes a share of free memory.
        kv_store: path of the block store; `None` turns it off.
        kv_store_bytes: bytes of the block store at most.
        kv_store_mode: `"rw"` (one process a file) or `"ro"`.
        kv_store_reset: replace a store that was made for another model instead of refusing it.
        kv_dtype: type K/V is kept in: `"auto"` (float16, or float32 on the plain path), a type's
            name, or on a GPU `"int8"`.
        prefix_cache: keep blocks of finished sequences for later requests while there is room.
        prefill_weights: how prompt chunks read weights on a GPU: `"packed"`, `"int8"`, `"auto"`.
        moe_residency_bytes: bytes of expert banks kept on the device; `"auto"` measures.
        device: `"auto"`, `"cpu"`, `"cuda"`, `"cuda:1"` and so on.
        dtype: type of activations; `"auto"` is float32 on a CPU.
        deterministic: on a GPU hold one arithmetic for every number of rows, at a cost in speed.
        widen_weights: on the plain path keep a bf16 copy of packed weights beside them.
        threads: CPU threads; `None` takes the cores this process may use.
        tune_dir: where measured choices are kept; `None` is the user's cache directory.
        max_waiting: requests that may wait; one more raises `QueueFullError`. `None`: no bound.

    Raises:
        OptionsError: naming the field, what was given and what is accepted.
    """

    context_length: int | None = None
    max_seqs: int = 8
    block_tokens: int = 16
    chunk: int | Literal["auto"] = "auto"
    chunk_budget_ms: float = 150.0
    kv_bytes: int | Literal["auto"] = "auto"
    kv_store: StrPath | None = None
    kv_store_bytes: int = GIB
    kv_store_mode: Literal["rw", "ro"] = "rw"
    kv_store_reset: bool = False
    kv_dtype: str = "auto"
    prefix_cache: bool = True
    prefill_weights: Literal["auto", "packed", "int8"] = "auto"
    moe_residency_bytes: int | Literal["auto"] = "auto"
    device: str = "auto"
    dtype: str = "auto"
    deterministic: bool = False
    widen_weights: bool = False
    threads: int | None = None
    tune_dir: StrPath | None = None
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        self._whole("context_length", 2, none=True)
        self._whole("max_seqs", 1, 4096)
        self._whole("block_tokens", 1, 1024)
        self._whole("chunk", 1, 1 << 16, auto=True)
        if not _is_number(self.chunk_budget_ms) or self.chunk_budget_ms <= 0:
            self._bad("chunk_budget_ms", "a number of milliseconds above 0")
        self._whole("kv_bytes", 1, auto=True)
        self._whole("kv_store_bytes", 1)
        self._whole("moe_residency_bytes", 0, auto=True)
        self._whole("threads", 1, 1024, none=True)
        self._whole("max_waiting", 0, none=True)
        for name in ("kv_store", "tune_dir"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str | os.PathLike) or value == ""):
                self._bad(name, "a path or None")
        for name in ("kv_store_reset", "prefix_cache", "deterministic", "widen_weights"):
            if not isinstance(getattr(self, name), bool):
                self._bad(name, "True or False")
        self._one_of("kv_store_mode", ("rw", "ro"))
        self._one_of("kv_dtype", KV_DTYPES)
        self._one_of("prefill_weights", ("auto", "packed", "int8"))
        self._one_of("dtype", DTYPES)
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:[0-9]+)?", self.device
        ):
            self._bad("device", '"auto", "cpu", "cuda" or "cuda:N"')

    def _bad(self, name: str, accepted: str) -> NoReturn:
        raise OptionsError(f"{name}={_shown(getattr(self, name))}: accepted is {accepted}")

    def _one_of(self, name: str, accepted: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in accepted:
            self._bad(name, ", ".join(f'"{word}"' for word in accepted))

    def _whole(
        self,
        name: str,
        low: int,
        high: int = (1 << 63) - 1,
        *,
        none: bool = False,
        auto: bool = False,
    ) -> None:
        value = getattr(self, name)
        if (none and value is None) or (auto and isinstance(value, str) and value == "auto"):
            return
        if not _is_int(value) or not low <= value <= high:
            also = " or None" if none else ' or "auto"' if auto else ""
            self._bad(name, f"a whole number from {low} to {high}{also}")

    def updated(self, overrides: Mapping[str, Any]) -> EngineOptions:
        """These options with some fields replaced.

        Raises:
            OptionsError: for an unknown field, or a value that is not accepted.
        """
        known = {field.name for field in fields(self)}
        for name in overrides:
            if name not in known:
                raise OptionsError(f"{name}: no such option; known are {', '.join(sorted(known))}")
        return replace(self, **overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and where it ends; checked when the object is made.

    Fields that default to `None` and are marked *checkpoint* take the checkpoint's own generation
    defaults, or the neutral value in brackets where it ships none.

    Attributes:
        max_tokens: output tokens at most; `None`: up to the context limit.
        min_tokens: no end of generation and no stop before this many output tokens.
        temperature: *checkpoint* (0). 0 is greedy: the most likely token.
        top_k: *checkpoint* (0). Keep the k most likely tokens; 0, -1 or above the vocabulary: off.
        top_p: *checkpoint* (1). Keep the smallest set whose probability reaches this.
        min_p: *checkpoint* (0). Drop tokens below this share of the most likely one's probability.
        typical_p: locally typical sampling; 1 is off.
        repetition_penalty: *checkpoint* (1). Divides positive and multiplies negative logits of
            tokens seen in prompt or output.
        presence_penalty: subtracted from logits of tokens in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        seed: 0 to 2**64-1; the same seed gives the same tokens. `None` draws one.
        stop: strings that end the request, not part of the text unless asked for.
        stop_token_ids: ids that end it.
        include_stop_str_in_output: keep the stop string (or stop token's text) in the text.
        ignore_eos: do not end at end-of-generation tokens.
        skip_special_tokens: leave control tokens out of the text.
        logprobs: `None`: off; k: log-probability of each token and of the k most likely ones.
        prompt_logprobs: the same for the prompt's tokens; computes the whole prompt.
        n: outputs for the one prompt, sharing its K/V blocks.
        logit_bias: token id to a number added to its logit.
        bad_words: strings that must not appear.
        logits_processors: callables (ids so far, float32 logits [vocab]) to logits.
        structured: grammar-constrained output; not yet available.

    Raises:
        RequestError: naming the field, what was given and what is accepted.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float = 1.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    structured: Any = None

    def __post_init__(self) -> None:
        if self.structured is not None:
            raise RequestError("structured: structured output is not yet available")
        self._whole("max_tokens", 1, none=True)
        self._whole("min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            self._bad("min_tokens", f"at most max_tokens={self.max_tokens}")
        self._real("temperature", 0.0, math.inf, none=True)
        self._whole("top_k", -1, none=True)
        self._real("top_p", 0.0, 1.0, none=True, above=True)
        self._real("min_p", 0.0, 1.0, none=True)
        self._real("typical_p", 0.0, 1.0, above=True)
        self._real("repetition_penalty", 0.0, MOST_PENALTY, none=True, above=True)
        self._real("presence_penalty", -MOST_PENALTY, MOST_PENALTY)
        self._real("frequency_penalty", -MOST_PENALTY, MOST_PENALTY)
        self._whole("seed", 0, (1 << 64) - 1, none=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                self._bad(name, "True or False")
        self._whole("logprobs", 0, none=True)
        self._whole("prompt_logprobs", 0, none=True)
        self._whole("n", 1)
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, self._strings(name))
        object.__setattr__(self, "stop_token_ids", self._items("stop_token_ids", TOKEN_IDS))
        if not all(_is_int(item) and item >= 0 for item in self.stop_token_ids):
            self._bad("stop_token_ids", TOKEN_IDS)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping) or not all(
                _is_int(key) and key >= 0 and self._is_bias(value)
                for key, value in self.logit_bias.items()
            ):
                self._bad(
                    "logit_bias",
                    "a mapping of token ids, whole numbers from 0, to finite numbers or -inf",
                )
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        processors = self._items("logits_processors", PROCESSORS)
        object.__setattr__(self, "logits_processors", processors)
        if not all(callable(item) for item in self.logits_processors):
            self._bad("logits_processors", PROCESSORS)

    @staticmethod
    def _is_bias(value: object) -> bool:
        return _is_number(value) or value == -math.inf

    def _bad(self, name: str, accepted: str) -> NoReturn:
        raise RequestError(f"{name}={_shown(getattr(self, name))}: accepted is {accepted}")

    def _whole(self, name: str, low: int, high: int = (1 << 63) - 1, *, none: bool = False) -> None:
        value = getattr(self, name)
        if none and value is None:
            return
        if not _is_int(value) or not low <= value <= high:
            self._bad(name, f"a whole number from {low} to {high}{' or None' if none else ''}")

    def _real(
        self, name: str, low: float, high: float, *, none: bool = False, above: bool = False
    ) -> None:
        value = getattr(self, name)
        if none and value is None:
            return
        if not _is_number(value) or not low <= value <= high or (above and value == low):
            span = (
                f"{'above' if above else 'from'} {low}"
                if high == math.inf
                else (f"{'above' if above else 'from'} {low} to {high}")
            )
            self._bad(name, f"a number {span}{' or None' if none else ''}")

    def _items(self, name: str, accepted: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if value is None:
            return ()
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            self._bad(name, accepted)
        return tuple(value)

    def _strings(self, name: str) -> tuple[str, ...]:
        value = getattr(self, name)
        items = (value,) if isinstance(value, str) else self._items(name, STRINGS)
        if not all(isinstance(item, str) and item for item in items):
            self._bad(name, STRINGS)
        return items

    def updated(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """These parameters with some fields replaced.

        Raises:
            RequestError: for an unknown field, or a value that is not accepted.
        """
        known = {field.name for field in fields(self)}
        for name in overrides:
            if name not in known:
                raise RequestError(
                    f"{name}: no such sampling parameter; known are {', '.join(sorted(known))}"
                )
        return replace(self, **overrides)

    def resolved(self, defaults: Mapping[str, float]) -> SamplingParams:
        """These parameters with every *checkpoint* field filled in.

        Args:
            defaults: the checkpoint's generation defaults by field name; may be empty.
        """
        neutral = {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        missing: dict[str, Any] = {
            name: defaults.get(name, value)
            for name, value in neutral.items()
            if getattr(self, name) is None
        }
        return replace(self, **missing)


class SamplingOverrides(TypedDict, total=False):
    """The fields of `SamplingParams`, for keyword arguments of `generate` and `chat`."""

    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str]
    logits_processors: Sequence[LogitsProcessor]
    structured: Any


class EngineOverrides(TypedDict, total=False):
    """The fields of `EngineOptions`, for keyword arguments of `AsyncEngine.load`."""

    context_length: int | None
    max_seqs: int
    block_tokens: int
    chunk: int | Literal["auto"]
    chunk_budget_ms: float
    kv_bytes: int | Literal["auto"]
    kv_store: StrPath | None
    kv_store_bytes: int
    kv_store_mode: Literal["rw", "ro"]
    kv_store_reset: bool
    kv_dtype: str
    prefix_cache: bool
    prefill_weights: Literal["auto", "packed", "int8"]
    moe_residency_bytes: int | Literal["auto"]
    device: str
    dtype: str
    deterministic: bool
    widen_weights: bool
    threads: int | None
    tune_dir: StrPath | None
    max_waiting: int | None
