"""Greedy tokens are llama.cpp's on the same file, up to the first near-tie."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compare_llamacpp import Comparison, compare_all, prompts

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]


def check(found: list[Comparison]) -> None:
    assert all(row.same_prompt for row in found), "a prompt is encoded differently"
    assert all(row.good for row in found), found
    # A wrong computation would part at once, and everywhere.
    assert sum(row.equal for row in found) > 0.5 * sum(row.compared for row in found), found


async def test_smollm2(smollm2_path: Path) -> None:
    check(await compare_all(smollm2_path, prompts(6), tokens=16, threads=1))


async def test_gemma(gemma_path: Path) -> None:
    check(await compare_all(gemma_path, prompts(6), tokens=16, threads=1))
