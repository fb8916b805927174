"""The whole engine on a GPU: cancelling, memory, two engines at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, EngineOptions, bench, synthetic
from asyncllm.engine_thread import Submission
from asyncllm.generation import Generation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = "tiny-q4_k_m"
BLOCK_TOKENS = 1024  # so that a sequence of these tests holds one block
MB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / f"{SHAPE}.gguf"
    synthetic.write(SHAPE, path)
    return path


@asynccontextmanager
async def loaded(path: Path, context_length: int = 4096) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.load(
        path,
        device="cuda",
        max_seqs=8,
        context_length=context_length,
        block_tokens=BLOCK_TOKENS,
        chunk=256,
    ) as engine:
        yield engine


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 100))


def prompt(seed: int, length: int = 4) -> list[int]:
    return random.Random(seed).choices(range(1, synthetic.SHAPES[SHAPE].vocabulary), k=length)


def generate(engine: AsyncEngine, ids: Sequence[int], tokens: int) -> Generation:
    return engine.generate(
        ids, max_tokens=tokens, temperature=0, ignore_eos=True, prefix_cache=False
    )


def together(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], tokens: int
) -> list[Generation]:
    """Generations that the engine thread finds all at once, so that one step begins them all."""
    held: list[Submission] = []
    thread = engine._thread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread, "submit", held.append)
        generations = [generate(engine, ids, tokens) for ids in prompts]
    for submission in held:
        thread.submit(submission)
    return generations


class Outputs:
    """What some generations have given so far."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.ids: list[list[int]] = [[] for _ in generations]
        self.chunks: list[int] = []  # tokens of each chunk of the first
        self._generations = generations
        self._tasks = [asyncio.create_task(self._take(at)) for at in range(len(generations))]

    async def _take(self, at: int) -> None:
        async for chunk in self._generations[at]:
            self.ids[at] += chunk.token_ids
            if at == 0:
                self.chunks.append(len(chunk.token_ids))

    async def ended(self) -> list[list[int]]:
        await asyncio.gather(*self._tasks)
        return self.ids


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "the condition never came true"
        await asyncio.sleep(0.001)


def test_cancelling_in_a_batch_frees_blocks_and_leaves_the_other_rows_alone(
    checkpoint: Path,
) -> None:
    victims = {1: 100, 4: 250, 6: 400}  # each after so many tokens; five rows are padded to eight

    async def test() -> None:
        prompts = [prompt(seed) for seed in range(8)]
        async with loaded(checkpoint) as engine:
            alone = await Outputs(together(engine, prompts, 1000)).ended()
            assert engine.stats().kv_blocks_used == 0
            generations = together(engine, prompts, 1000)
            outputs = Outputs(generations)
            for number, (victim, tokens) in enumerate(victims.items(), 1):
                ids = outputs.ids[victim]
                await until(lambda ids=ids, tokens=tokens: len(ids) >= tokens)  # type: ignore[misc]
                assert engine.stats().kv_blocks_used == 9 - number
                assert engine.stats().decode_mode == "batched"
                await generations[victim].cancel()
                assert engine.stats().kv_blocks_used == 8 - number
            found = await outputs.ended()
            assert engine.stats().kv_blocks_used == 0
            assert engine.stats().cancelled == len(victims)
        for at, (expected, ids) in enumerate(zip(alone, found, strict=True)):
            assert len(expected) == 1000
            if at in victims:
                assert victims[at] <= len(ids) < 1000
            assert ids == expected[: len(ids) if at in victims else 1000], at

    run(test())


def test_cancelling_a_pipelined_sequence_frees_its_blocks(checkpoint: Path) -> None:
    async def test() -> None:
        async with loaded(checkpoint) as engine:
            expected = list((await generate(engine, prompt(1), 64)).token_ids)
            generation = generate(engine, prompt(1), 900)
            outputs = Outputs([generation])
            (ids,) = outputs.ids
            await until(lambda: len(ids) >= 64)
            assert engine.stats().decode_mode == "pipelined"
            assert engine.stats().kv_blocks_used == 1
            await generation.cancel()
            assert engine.stats().kv_blocks_used == 0
            await outputs.ended()
            assert ids[:64] == expected
            assert len(ids) < 900
            again = await generate(engine, prompt(1), 64)
            assert list(again.token_ids) == expected
            assert engine.stats().kv_blocks_used == 0

    run(test())


def test_a_thousand_decode_steps_allocate_nothing(checkpoint: Path) -> None:
    settings = bench.Settings(
        model=checkpoint,
        rounds=1,
        tokens=8,
        batches=(1,),
        prompts=(16,),
        allocations=True,
        options=EngineOptions(device="cuda", block_tokens=BLOCK_TOKENS),
    )

    async def test() -> None:
        report = await bench.bench(settings, read_ceilings=lambda device, threads: {})
        assert dict(report.allocations) == {1: 0, 32: 0}

    run(test())


def test_closing_gives_the_memory_back(checkpoint: Path) -> None:
    def free() -> int:
        return int(torch.cuda.mem_get_info()[0])

    async def test() -> None:
        torch.zeros(1, device="cuda")  # what CUDA itself takes of a process stays
        before = free()
        async with loaded(checkpoint, context_length=1 << 16) as engine:
            # Some 430 MB of K and V, which all of them hold at once.
            generations = [generate(engine, prompt(seed, 60_000), 5000) for seed in range(7)]
            await until(lambda: engine.stats().decoding == 7)
            assert before - free() > 350 * MB
            assert not any(generation.done for generation in generations)
        assert abs(before - free()) < 300 * MB

    run(test())


def test_a_model_is_loaded_again_and_twice_at_once(checkpoint: Path) -> None:
    async def test() -> None:
        async with loaded(checkpoint) as engine:
            expected = list((await generate(engine, prompt(1), 200)).token_ids)
        async with loaded(checkpoint) as first, loaded(checkpoint) as second:
            # Both capture their steps now, each while the other runs.
            done = await asyncio.gather(
                *(generate(engine, prompt(1), 200).result() for engine in (first, second))
            )
            assert [list(each.token_ids) for each in done] == [expected] * 2
            await first.aclose()
            again = await generate(second, prompt(1), 200)
            assert list(again.token_ids) == expected

    run(test())


def test_a_blocked_loop_finds_its_tokens_waiting(checkpoint: Path) -> None:
    async def test() -> None:
        async with loaded(checkpoint, context_length=1 << 16) as engine:
            generation = generate(engine, prompt(1), 60_000)
            outputs = Outputs([generation])
            await until(lambda: len(outputs.ids[0]) >= 100)
            steps = engine.stats().steps
            time.sleep(0.5)
            blocked = engine.stats().steps - steps
            got = len(outputs.chunks)
            await until(lambda: len(outputs.chunks) > got)
            waited = max(outputs.chunks[got:])
            steps = engine.stats().steps
            await asyncio.sleep(0.5)
            free = engine.stats().steps - steps
            await generation.cancel()
            await outputs.ended()
        assert blocked > 0.5 * free > 20
        assert waited > 0.9 * blocked  # all that came meanwhile are one chunk

    run(test())
