"""The kernel that chooses tokens, against the sampler's filters in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from asyncllm.kernels.cpu import sampling
from asyncllm.kernels.cpu import step as s
from asyncllm.sampling.filters import Filter, choose
from tests.cpu_kernels import Array, kernel, record, run_rows


class Chooser:
    """Runs the kernel on some rows of logits, with more columns behind the vocabulary's."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        padded = -(-vocabulary // 16) * 16 + 32
        self.vocabulary = vocabulary
        self.logits = np.full((rows, padded), 1e9, np.float32)
        self.draws = np.zeros((rows, sampling.DRAW_BYTES // 8), np.float64)
        self._out = np.zeros(rows, np.int64)
        self._peaks = np.zeros(rows, np.float32)
        self._scratch = np.zeros(sampling.scratch_bytes(vocabulary), np.uint8)
        self._function = kernel("choice", sampling.choice)

    def __call__(self, logits: Array) -> list[int]:
        self.logits[:, : self.vocabulary] = logits
        parameters = record(
            s.CHOICE,
            logits=self.logits,
            stride=self.logits.strides[0],
            padded=self.logits.shape[1],
            count=self.vocabulary,
            draws=self.draws,
            tokens=self._out,
            peaks=self._peaks,
            scratch=self._scratch,
            scratch_stride=0,
        )
        run_rows(self._function, parameters, len(self.logits), each=1)
        for row, token in enumerate(self._out):
            logit = np.nan if token < 0 else self.logits[row, token]
            assert np.array_equal(self._peaks[row], logit, equal_nan=True)
        found: list[int] = self._out.tolist()
        return found


@pytest.mark.parametrize("vocabulary", [3, 50, 1000, 5000])
def test_chosen_tokens_are_those_of_the_filters(vocabulary: int) -> None:
    chance = np.random.default_rng(vocabulary)
    rows = 6
    chooser = Chooser(rows, vocabulary)
    for _ in range(120):
        logits = chance.standard_normal((rows, vocabulary)) * chance.choice([0.0, 0.1, 1.0, 4.0])
        logits = logits.astype(np.float32)
        filters, uniforms = [], []
        for row in range(rows):
            filters.append(
                Filter(
                    temperature=float(chance.choice([0.3, 1.0, 2.0, 5.0])),
                    top_k=int(chance.choice([vocabulary, 1, 2, min(40, vocabulary)])),
                    top_p=float(chance.choice([math.inf, 0.1, 0.5, 0.95, 0.999])),
                    min_p=float(chance.choice([0.0, 0.05, 0.5, 1.0])),
                    typical_p=math.inf,
                )
            )
            uniforms.append(float(chance.random()))
            kept = filters[-1]
            chooser.draws[row, :5] = (
                *(kept.temperature, kept.top_k, kept.top_p, kept.min_p),
                uniforms[-1],
            )
        assert chooser(logits) == choose(torch.from_numpy(logits), filters, uniforms)


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1.0, 0.0)])
def test_the_ends_of_the_distribution_are_tokens_of_the_vocabulary(uniform: float) -> None:
    chooser = Chooser(2, 300)
    for top_k, top_p in ((300, math.inf), (10, math.inf), (300, 0.9)):
        chooser.draws[:, :5] = (1.0, top_k, top_p, 0.0, uniform)
        logits = np.zeros((2, 300), np.float32)
        assert all(0 <= token < 300 for token in chooser(logits))


def test_what_no_filter_keeps_is_never_drawn() -> None:
    chooser = Chooser(1, 2000)
    logits = np.zeros((1, 2000), np.float32)
    logits[0, [7, 900, 1999]] = 5.0
    drawn = set()
    for uniform in np.linspace(0, 0.999, 50):
        chooser.draws[0, :5] = (1.0, 3, math.inf, 0.0, uniform)
        drawn |= set(chooser(logits))
    assert drawn == {7, 900, 1999}


def test_sick_logits_are_not_drawn_from() -> None:
    chooser = Chooser(3, 100)
    chooser.draws[:, :5] = (1.0, 100, math.inf, 0.0, 0.5)
    logits = np.zeros((3, 100), np.float32)
    logits[0, 4] = np.nan
    logits[1, 9] = np.inf
    logits[2] = -np.inf
    nan, infinite, none = chooser(logits)
    assert (nan, infinite) == (-1, 9)
    assert not math.isfinite(chooser.logits[2, none])
