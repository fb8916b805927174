"""A whole `AsyncEngine` over the fake runner: everything is real but the model and the text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncllm.engine import EngineLoading
from asyncllm.engine_thread import Face, Loading, Parts
from asyncllm.info import LoadProgress, ModelInfo
from asyncllm.kv.blocks import KvCache
from asyncllm.options import EngineOptions, SamplingParams
from asyncllm.scheduler.chunking import ChunkPolicy
from asyncllm.scheduler.scheduler import Scheduler
from asyncllm.scheduler.step import LayerGroup, StepInterrupted, StepPlan, StepResult
from tests.fake_runner import END, VOCABULARY, FakeRunner

INFO = ModelInfo(
    name="fake",
    architecture="fake",
    parameters=0,
    formats={},
    weights_bytes=0,
    context_length=4096,
    model_context_length=4096,
    kv_ceiling_tokens=0,
    kv_ceiling_bytes=0,
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    backend="fake",
    backend_notes=(),
    deterministic=True,
    load_stages=(),
)


class FakeTokenizer:
    """Token 0 ends; the others are letters."""

    vocab_size = VOCABULARY
    eog_ids = frozenset({END})
    chat_template = None

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(c) % (VOCABULARY - 1) + 1 for c in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: object) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(64 + token) for token in ids if token != END)


class FakeText:
    """Text without surprises; a stop string of one letter ends it."""

    def __init__(self, params: SamplingParams) -> None:
        self._stops = params.stop

    def feed(self, ids: Sequence[int]) -> tuple[str, str | None]:
        text = letters(ids)
        return ("", text) if text in self._stops else (text, None)

    def flush(self) -> str:
        return ""


class SlowRunner(FakeRunner):
    """Takes real time for a step, as a device does: without the interpreter's lock."""

    def __init__(
        self, groups: Sequence[LayerGroup], block_tokens: int, step_s: float, **more: Any
    ) -> None:
        super().__init__(groups, block_tokens, **more)
        self.step_s = step_s
        self.fault: BaseException | None = None
        self.should_stop: Callable[[], bool] = lambda: False
        self.prompt_tokens_computed = 0
        self.closed = False

    def submit(self, plan: StepPlan) -> int:
        if self.fault is not None:
            raise self.fault
        self.prompt_tokens_computed += plan.prompt_rows
        until = time.perf_counter() + self.step_s
        while (left := until - time.perf_counter()) > 0:
            time.sleep(min(left, 0.01))
            if self.should_stop():
                raise StepInterrupted
        return super().submit(plan)

    def collect(self, ticket: int) -> StepResult:
        return replace(super().collect(ticket), waited_s=self.step_s)

    def close(self) -> None:
        self.closed = True
        super().close()


class FakeModel:
    """What a test sets before it loads the engine, and looks at afterwards."""

    def __init__(
        self,
        *,
        blocks: int = 256,
        block_tokens: int = 4,
        context_length: int = 4096,
        step_s: float = 0.0,
        ahead: bool = False,
        chunk: int = 16,
        build_s: float = 0.0,
        build_error: Exception | None = None,
        **options: Any,
    ) -> None:
        self.options = EngineOptions(**options)
        self.groups = [LayerGroup(None, (0,), 64, blocks)]
        self.runner = SlowRunner(self.groups, block_tokens, step_s, one_step_ahead=ahead)
        self.build_calls = 0
        self._block_tokens = block_tokens
        self._context_length = context_length
        self._chunk = chunk
        self._build_s = build_s
        self._build_error = build_error

    def load(self, on_progress: Callable[[LoadProgress], object] | None = None) -> EngineLoading:
        return EngineLoading(self._build, self.options, on_progress)

    def _build(self, loading: Loading) -> Parts:
        self.build_calls += 1
        runner = self.runner
        runner.should_stop = loading.should_stop
        loading.progress(LoadProgress("weights", 0.5))
        until = time.perf_counter() + self._build_s
        while time.perf_counter() < until:
            if loading.should_stop():
                runner.close()
                raise RuntimeError("loading was given up")
            time.sleep(0.005)
        if self._build_error is not None:
            raise self._build_error
        chunk = ChunkPolicy(self._chunk, 1e9)
        cache = KvCache(
            self.groups,
            block_tokens=self._block_tokens,
            max_chunk=chunk.maximum,
            grow=runner.grow,
            fingerprint=b"fake",
            prefix_cache=self.options.prefix_cache,
        )
        scheduler = Scheduler(
            cache,
            max_seqs=self.options.max_seqs,
            context_length=self._context_length,
            chunk=chunk,
            decode_refusal=runner.decode_refusal,
        )
        loading.progress(LoadProgress("ready", 1.0))
        return Parts(
            face=Face(INFO, FakeTokenizer(), {}),
            scheduler=scheduler,
            runner=runner,
            new_text=FakeText,
            token_text=lambda token: letters((token,)),
            pool_bytes=lambda: cache.blocks_total * 64,
            close=runner.close,
        )


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait on the loop until the condition holds; fails the test after `seconds`."""
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "the condition never came true"
        await asyncio.sleep(0.002)
