"""Our side: this library, called as an application calls it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from asyncllm.bench.report import Load
from asyncllm.bench.workload import (
    NoWindowError,
    Prompts,
    Sample,
    Settings,
    Workload,
    check_tokens,
)
from asyncllm.engine import AsyncEngine
from asyncllm.generation import Generation
from asyncllm.info import EngineStats, ModelInfo
from asyncllm.options import EngineOptions

LoadEngine = Callable[[Path, EngineOptions], Awaitable[AsyncEngine]]


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment of a batch.

    Attributes:
        at: seconds of `time.perf_counter`.
        tokens: that have arrived, of all sequences.
        stats: of the engine.
        allocations: that torch has made on the device.
    """

    at: float
    tokens: int
    stats: EngineStats
    allocations: int


class _Window:
    """Follows a batch from when its last sequence has begun until its first has ended."""

    def __init__(self, engine: AsyncEngine, sequences: int, allocations: Callable[[], int]) -> None:
        self._engine = engine
        self._allocations = allocations
        self._counts = [0] * sequences
        self.begun: _Mark | None = None
        self.ended: _Mark | None = None

    async def follow(self, index: int, generation: Generation) -> int:
        """Take what a sequence gives; returns how many tokens it were."""
        # What one step gave wakes all who wait for it in the same turn of the loop: at its end
        # everything that has arrived is counted.
        loop = asyncio.get_running_loop()
        async for chunk in generation:
            begins = not self._counts[index]
            self._counts[index] += len(chunk.token_ids)
            if begins and all(self._counts):
                loop.call_soon(self._begin)
            if chunk.finish_reason is not None:
                loop.call_soon(self._end)
        return self._counts[index]

    def _mark(self) -> _Mark:
        at = time.perf_counter()
        return _Mark(at, sum(self._counts), self._engine.stats(), self._allocations())

    def _begin(self) -> None:
        if self.begun is None:
            self.begun = self._mark()

    def _end(self) -> None:
        if self.ended is None:
            self.ended = self._mark()

    def marks(self) -> tuple[_Mark, _Mark]:
        """The begin and the end.

        Raises:
            NoWindowError: there was no time in which all were running.
        """
        begun, ended = self.begun, self.ended
        if begun is None or ended is None or ended.tokens <= begun.tokens:
            count = len(self._counts)
            raise NoWindowError(
                f"the first of {count} sequences had ended before the last had begun: give "
                "more tokens; where the K/V pool cannot hold them all at once, fewer sequences"
            )
        return begun, ended


class Ours:
    """This library.

    Args:
        settings: what is measured.
        threads: of the engine; `None`: as it likes.
        load: makes the engine.
    """

    name = "asyncllm"
    warms_up = True

    def __init__(self, settings: Settings, threads: int | None, load: LoadEngine) -> None:
        self._model = settings.model
        self._threads = threads
        self._options = replace(
            settings.options,
            threads=threads,
            max_seqs=settings.max_seqs,
            context_length=settings.context_length,
        )
        self._load = load
        self._engine: AsyncEngine | None = None
        self.info: ModelInfo | None = None
        self.loads: list[Load] = []
        self.preempted = 0
        self.vocabulary = range(0)
        self.excluded: frozenset[int] = frozenset()

    async def open(self) -> None:
        started = time.perf_counter()
        engine = self._engine = await self._load(self._model, self._options)
        seconds = time.perf_counter() - started
        self.loads.append(Load(self._threads, seconds, engine.info.load_stages))
        self.info = engine.info
        self.vocabulary = range(engine.tokenizer.vocab_size)
        self.excluded = frozenset(engine.tokenizer.eog_ids)

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            self.preempted += engine.stats().preempted
            await engine.aclose()

    async def measure(self, workload: Workload, prompts: Prompts) -> Sample:
        if workload.kind in ("one", "decode"):
            return await self._decode(workload, prompts)
        started = time.perf_counter()
        generations = self._generate(workload, prompts)
        done = await asyncio.gather(*(generation.result() for generation in generations))
        seconds = time.perf_counter() - started
        tokens = sum(completion.usage.completion_tokens for completion in done)
        check_tokens(self.name, tokens, workload)
        if workload.kind == "prompt":
            return Sample(workload.prompt_tokens / seconds, first_token_s=seconds)
        return Sample(tokens / seconds)

    async def allocations(self, workload: Workload, prompts: Prompts) -> int:
        """Memory that torch allocates on the device while a batch decodes: how many times."""
        _, (begun, ended) = await self._run(workload, prompts, self._allocated)
        return ended.allocations - begun.allocations

    async def _decode(self, workload: Workload, prompts: Prompts) -> Sample:
        started, (begun, ended) = await self._run(workload, prompts, lambda: 0)
        steps = ended.stats.steps - begun.stats.steps
        host_s = ended.stats.host_s - begun.stats.host_s
        alone = workload.sequences == 1 and workload.depth == 0
        return Sample(
            (ended.tokens - begun.tokens) / (ended.at - begun.at),
            first_token_s=begun.at - started if alone else None,
            host_s=host_s / steps if steps else None,
        )

    async def _run(
        self, workload: Workload, prompts: Prompts, allocations: Callable[[], int]
    ) -> tuple[float, tuple[_Mark, _Mark]]:
        """When it was submitted, and the time in which all sequences decode."""
        assert self._engine is not None
        if workload.depth:  # leaves the prompts in the cache, but for their last block
            first = self._generate(replace(workload, tokens=1), prompts)
            await asyncio.gather(*(generation.result() for generation in first))
        window = _Window(self._engine, workload.sequences, allocations)
        started = time.perf_counter()
        generations = self._generate(workload, prompts)
        follow = (window.follow(index, each) for index, each in enumerate(generations))
        check_tokens(self.name, sum(await asyncio.gather(*follow)), workload)
        return started, window.marks()

    def _generate(self, workload: Workload, prompts: Prompts) -> list[Generation]:
        assert self._engine is not None
        # Warm-up and rounds have prompts of their own; no cache is to be searched or filled either,
        # but for a depth.
        return [
            self._engine.generate(
                prompt,
                prefix_cache=workload.depth > 0,
                max_tokens=workload.tokens,
                temperature=0,
                repetition_penalty=1.0,
                ignore_eos=True,
            )
            for prompt in prompts
        ]

    def _allocated(self) -> int:
        import torch

        assert self.info is not None
        stats = torch.cuda.memory_stats(self.info.device)
        return int(stats["allocation.all.allocated"])
