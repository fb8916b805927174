"""The block store of an engine on a GPU: blocks leave and come back through pinned memory."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from asyncllm import AsyncEngine, Completion, synthetic
from tests.store_disks import spoil, written

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(520),
]

SHAPE = "tiny-q4_k_m"
BLOCK_TOKENS = 16
WINDOW = 40
MODELS = {"full": {}, "windows": {"sliding_window": WINDOW, "sliding_window_pattern": 2}}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without windows, or with one over every other layer."""

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def add_block_count(self, length: int) -> None:
            super().add_block_count(length)
            for key, value in MODELS[request.param].items():
                self.add_uint32(f"llama.attention.{key}", value)

    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        synthetic.write(SHAPE, path)
    return path


@asynccontextmanager
async def loaded(path: Path, store: Path | None = None, **more: Any) -> AsyncIterator[AsyncEngine]:
    # One arithmetic: what is adopted changes the chunks that a prompt is computed in.
    options: dict[str, Any] = {
        **{"device": "cuda", "deterministic": True, "max_seqs": 8, "context_length": 1024},
        **{"block_tokens": BLOCK_TOKENS, "chunk": 64, "kv_store": store},
        "kv_store_bytes": 16 << 20,
    }
    async with AsyncEngine.load(path, **(options | more)) as engine:
        assert engine.info.device.startswith("cuda")
        yield engine


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 500))


def prompts(count: int = 12) -> list[list[int]]:
    """Prompts that share beginnings of several lengths."""
    chance, tokens = random.Random(5), range(1, synthetic.SHAPES[SHAPE].vocabulary)
    stems = [chance.choices(tokens, k=length) for length in (400, 170, 60)]
    return [stems[i % 3] + chance.choices(tokens, k=i % 7 + 1) for i in range(count)]


async def answers(
    engine: AsyncEngine, asked: Sequence[Sequence[int]], **more: Any
) -> list[Completion]:
    options = {"max_tokens": 24, "temperature": 0, "ignore_eos": True} | more
    generations = [engine.generate(each, **options) for each in asked]
    return await asyncio.gather(*(generation.result() for generation in generations))


def tokens(done: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in done]


def cached(done: Sequence[Completion]) -> int:
    return sum(each.usage.cached_tokens for each in done)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_tokens_are_those_of_an_engine_without_a_store(
    model: Path, tmp_path: Path, kv_dtype: str
) -> None:
    async def test() -> None:
        asked, store = prompts(), tmp_path / "blocks"
        more: dict[str, Any] = {"kv_dtype": kv_dtype}
        async with loaded(model, **more, prefix_cache=False) as engine:
            expected = tokens(await answers(engine, asked))
            seeded = tokens(await answers(engine, asked, temperature=1.0, seed=3))
        assert len(set(expected)) > len(asked) // 2  # or it would say little
        async with loaded(model, store, **more) as engine:
            assert tokens(await answers(engine, asked)) == expected, "cold"
            assert tokens(await answers(engine, asked)) == expected, "warm"
            await written(engine)
            stats = engine.stats()
            assert stats.store_written_blocks > 20
            assert stats.store_faults == stats.store_rejected_blocks == 0
        async with loaded(model, store, **more) as engine:
            found = await answers(engine, asked)
            assert tokens(found) == expected, "after a restart"
            assert tokens(await answers(engine, asked, temperature=1.0, seed=3)) == seeded
            assert cached(found) > 0.8 * sum(map(len, asked))
            assert engine.stats().store_hit_blocks >= 6
        spoil(store, 0.5)
        async with loaded(model, store, **more) as engine:
            assert tokens(await answers(engine, asked)) == expected, "over a damaged file"

    run(test())


def test_after_a_restart_only_the_tail_is_computed(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        rows = []
        for _ in range(2):
            async with loaded(model, tmp_path / "blocks") as engine:
                caplog.clear()
                with caplog.at_level(logging.DEBUG, logger="asyncllm"):
                    (done,) = await answers(engine, [prompts()[3]], max_tokens=1)
            steps = [r for r in caplog.records if r.__dict__.get("event") == "sched-phase"]
            rows.append(sum(record.__dict__["fields"]["prompt_tokens"] for record in steps))
        assert rows == [404, 4]
        assert done.usage.cached_tokens == 400

    run(test())


def test_what_was_preempted_comes_back_from_the_store(model: Path, tmp_path: Path) -> None:
    async def test() -> None:
        asked = prompts(6)
        async with loaded(model, context_length=512, prefix_cache=False) as engine:
            expected = tokens(await answers(engine, asked, max_tokens=100))
        shape = synthetic.SHAPES[SHAPE]
        block_bytes = shape.layers * 2 * BLOCK_TOKENS * shape.kv_heads * shape.head_dim * 2
        small = {"context_length": 512, "kv_bytes": 56 * block_bytes}
        async with loaded(model, tmp_path / "blocks", **small) as engine:
            assert tokens(await answers(engine, asked, max_tokens=100)) == expected
            assert engine.stats().store_written_blocks > 0
            assert engine.stats().resumed > 0

    run(test())


def test_blocks_are_read_while_others_decode(model: Path, tmp_path: Path) -> None:
    async def test() -> None:
        asked, store = prompts(), tmp_path / "blocks"
        async with loaded(model, store) as engine:
            expected = tokens(await answers(engine, asked))
            long = tokens(await answers(engine, [[1, 2, 3]], max_tokens=900))
        async with loaded(model, store) as engine:
            running = engine.generate([1, 2, 3], max_tokens=900, temperature=0, ignore_eos=True)
            chunks = aiter(running)  # dropping it would cancel
            ids = [*(await anext(chunks)).token_ids]
            found = await answers(engine, asked[:7])
            assert not running.done
            assert tokens(found) == expected[:7]
            assert cached(found) > 0
            async for chunk in chunks:
                ids += chunk.token_ids
            assert tuple(ids) == long[0]

    run(test())


def test_several_outputs_fork_what_was_adopted(model: Path, tmp_path: Path) -> None:
    async def test() -> None:
        found = []
        for store in (None, tmp_path / "blocks", tmp_path / "blocks"):
            async with loaded(model, store) as engine:
                (done,) = await answers(
                    engine, prompts(1), max_tokens=30, temperature=1.0, seed=1, n=3
                )
                found.append([choice.token_ids for choice in done.choices])
        assert found[0] == found[1] == found[2]
        assert len(set(found[0])) == 3
        assert done.usage.cached_tokens > 0

    run(test())
