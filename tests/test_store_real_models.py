"""Real checkpoints with a block store: the same tokens, and only the tail of a prompt computed."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import pytest

from asyncllm import AsyncEngine, Completion
from tests.store_disks import spoil, written
from tests.test_real_models import STORY

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

STEMS = [STORY * 12, STORY * 5 + "Then came the winter. " * 20, "Once upon a time " * 60]
PROMPTS = [f"{STEMS[i % 3]}{STORY * (i % 2)}Number {i} of them" for i in range(32)]


@pytest.fixture(params=["smollm2_path", "gemma_path"])
def model_path(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


async def answers(engine: AsyncEngine) -> list[Completion]:
    generations = [
        engine.generate(prompt, max_tokens=6, temperature=0, ignore_eos=True) for prompt in PROMPTS
    ]
    return await asyncio.gather(*(generation.result() for generation in generations))


async def test_tokens_of_32_prompts_are_those_without_a_store(
    model_path: Path, tmp_path: Path
) -> None:
    store = tmp_path / "blocks"
    async with AsyncEngine.load(model_path, threads=1) as engine:
        expected = [done.token_ids for done in await answers(engine)]
    for state in ("cold", "after a restart", "half of it damaged"):
        if state == "half of it damaged":
            spoil(store, 0.5)
        async with AsyncEngine.load(
            model_path, threads=1, kv_store=store, kv_store_bytes=256 << 20
        ) as engine:
            found = await answers(engine)
            assert [done.token_ids for done in found] == expected, state
            assert (engine.stats().store_hit_blocks > 0) == (state != "cold")
            if state == "half of it damaged":
                assert engine.stats().store_rejected_blocks > 0
            if state == "cold":
                warm = await answers(engine)
                assert [done.token_ids for done in warm] == expected, "warm"
            assert engine.stats().store_faults == 0
            await written(engine)
            assert store.stat().st_size <= 256 << 20


async def test_after_a_restart_a_long_prompt_runs_only_over_its_tail(
    smollm2_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = random.Random(1).choices(range(1000, 40_000), k=1500)
    rows, seconds = [], []
    for _ in range(2):
        async with AsyncEngine.load(
            smollm2_path, threads=1, kv_store=tmp_path / "blocks"
        ) as engine:
            caplog.clear()
            with caplog.at_level(logging.DEBUG, logger="asyncllm"):
                done = await engine.generate(prompt, max_tokens=1, temperature=0)
            steps = [r for r in caplog.records if r.__dict__.get("event") == "sched-phase"]
            rows.append(sum(record.__dict__["fields"]["prompt_tokens"] for record in steps))
            assert done.timings.first_token_s is not None
            seconds.append(done.timings.first_token_s)
    assert rows == [1500, 1500 - 1488]
    assert done.usage.cached_tokens == 1488
    assert seconds[0] > 5 * seconds[1]
