"""Greedy tokens against llama.cpp's on the same file; the script compares more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm import Tokenizer
from scripts import compare_llamacpp

PROMPTS, TOKENS = 6, 16

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]


@pytest.fixture(params=["smollm2_path", "gemma_path"])
def model_path(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def test_greedy_tokens_are_those_of_llamacpp_up_to_a_near_tie(model_path: Path) -> None:
    report = compare_llamacpp.compare(model_path, PROMPTS, TOKENS)
    assert report.problems == ()
    assert len(report.comparisons) == PROMPTS
    for found in report.comparisons:
        assert found.equal == TOKENS or found.parting is not None
    # Near-ties are rare: were most prompts to part, their outputs would hardly be compared.
    assert sum(found.equal for found in report.comparisons) >= PROMPTS * TOKENS // 2


def test_prompts_are_of_many_lengths_and_all_different(model_path: Path) -> None:
    tokenizer = Tokenizer.from_file(model_path)
    texts = compare_llamacpp.prompts(tokenizer, len(compare_llamacpp.LENGTHS))
    lengths = [len(tokenizer.encode(text)) for text in texts]
    assert len(set(texts)) == 32
    assert 5 <= min(lengths) <= 8
    assert 800 <= max(lengths) <= 900
