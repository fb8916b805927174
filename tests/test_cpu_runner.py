"""Decoding steps on the CPU run in the background, and nobody can tell but by the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from asyncllm import AsyncEngine, synthetic
from asyncllm.kernels.cpu.team import can_team
from asyncllm.runner import cpu_runner
from asyncllm.runner.cpu_runner import CpuRunner
from asyncllm.runner.threads import physical_cores
from asyncllm.scheduler.step import StepPlan
from tests.cpu_kernels import directory

pytestmark = pytest.mark.skipif(
    not can_team() or physical_cores() < 2,
    reason="steps run in the background where a thread can wait and a second core is",
)

NEVER = -1.0  # seconds below which a step runs ahead


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ahead") / "m.gguf"
    synthetic.write("tiny-q4_k_m", made)
    return made


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CpuRunner]]:
    """Every runner that is made."""
    made: list[CpuRunner] = []
    real = CpuRunner.__init__

    def noted(self: CpuRunner, *arguments: Any, **more: Any) -> None:
        real(self, *arguments, **more)
        made.append(self)

    monkeypatch.setattr(CpuRunner, "__init__", noted)
    yield made


def load(path: Path, **more: Any) -> Any:
    more |= {"max_seqs": 8, "context_length": 256, "chunk": 32, "tune_dir": directory()}
    return AsyncEngine.load(path, **more)


REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 33, "temperature": 1.0, "seed": 5},
    {"max_tokens": 21, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 6},
    {"max_tokens": 12, "repetition_penalty": 1.3},
    {"max_tokens": 9, "logprobs": 2},
    {"max_tokens": 30, "min_tokens": 6},
    {"max_tokens": 1},
]


async def answers(engine: AsyncEngine, ask: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    generations = []
    for number, options in enumerate(ask):
        prompt = [(7 * number + place) % 200 + 3 for place in range(3 + 9 * number)]
        options = {"temperature": 0, "ignore_eos": True} | options
        generations.append(engine.generate(prompt, **options))
        await asyncio.sleep(0.002 * (number % 3))
    return [(await generation).token_ids for generation in generations]


@pytest.mark.parametrize("threads", [1, 2])
async def test_tokens_are_those_of_steps_in_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    async with load(path, threads=threads) as engine:
        alone = [(await answers(engine, [options]))[0] for options in REQUESTS]
        mixed = await answers(engine, REQUESTS)
        begun = await answers(engine, REQUESTS[:3])
    monkeypatch.setattr(cpu_runner, "AHEAD_BELOW_S", NEVER)
    async with load(path, threads=threads) as engine:
        assert [(await answers(engine, [options]))[0] for options in REQUESTS] == alone
        assert await answers(engine, REQUESTS) == mixed
        assert begun == mixed[:3]
        assert engine.stats().decode_mode_reason.startswith("a step takes so long")


async def test_a_stop_in_the_middle_throws_the_step_ahead_away(path: Path) -> None:
    async with load(path) as engine:
        [whole] = await answers(engine, [{"max_tokens": 30}])
        stop = whole[11]
        first = whole.index(stop)
        done = await engine.generate(
            [3, 4, 5], temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop]
        )
        assert done.token_ids[:first] == whole[:first]
        assert done.finish_reason == "stop"
        assert (await answers(engine, [{"max_tokens": 30}]))[0] == whole
        assert engine.stats().kv_blocks_used == 0


async def test_a_cancel_leaves_nothing_behind_and_the_others_alone(
    path: Path, runners: list[CpuRunner]
) -> None:
    async with load(path) as engine:
        expected = await answers(engine, REQUESTS[:2])
        for after in range(1, 6):
            others = asyncio.ensure_future(answers(engine, REQUESTS[:2]))
            seen = 0
            async for _ in engine.generate([9, 8, 7], temperature=0, ignore_eos=True):
                seen += 1
                if seen == after:
                    break
            assert await others == expected
        stats = engine.stats()
        while stats.running or stats.kv_blocks_used:
            await asyncio.sleep(0.01)
            stats = engine.stats()
        await answers(engine, REQUESTS[:1])  # whose plan tells the runner who ended
        [runner] = runners
        assert len(runner._states) <= 1, "what sequences had is kept after their end"


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        ({}, ""),
        ({"temperature": 1.0, "seed": 1}, ""),
        ({"logprobs": 1}, "it wants logprobs"),
        ({"repetition_penalty": 1.2}, "it has penalties, biases or min_tokens"),
        ({"min_tokens": 300}, "it has penalties, biases or min_tokens"),
        ({"prompt_logprobs": 1}, "it wants prompt_logprobs"),
    ],
)
async def test_stats_say_why_a_sequence_does_not_run_ahead(
    path: Path, ask: dict[str, Any], reason: str
) -> None:
    async with load(path) as engine:
        options = {"temperature": 0, "ignore_eos": True, "max_tokens": 8} | ask
        options["min_tokens"] = min(options.get("min_tokens", 0), 8)
        seen = set()
        async for _ in engine.generate([5, 6, 7, 8], **options):
            stats = engine.stats()
            seen.add((stats.decode_mode, stats.decode_mode_reason))
        mode = "plain" if reason else "pipelined"
        assert any(each == mode and said.endswith(reason) for each, said in seen), seen
        assert not reason or not any(each == "pipelined" for each, _ in seen), seen


async def test_steps_are_ahead_only_while_they_are_short(
    path: Path, runners: list[CpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[StepPlan] = []
    real = CpuRunner._begin

    def noted(self: CpuRunner, plan: StepPlan) -> Any:
        begun.append(plan)
        return real(self, plan)

    monkeypatch.setattr(CpuRunner, "_begin", noted)
    async with load(path) as engine:
        await answers(engine, [{"max_tokens": 20}])
        assert len(begun) >= 18
        begun.clear()
        runners[0]._decode_s = 1.0  # one slow step
        await answers(engine, [{"max_tokens": 20}])
        assert 0 < len(begun) < 20, "one in turn shows that they are short again"
