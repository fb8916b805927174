"""Philox4x32-10 against its published vectors, and as the sampler uses it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.sampling.philox import philox4x32, uniform, uniforms

# Known-answer vectors of the Random123 distribution (tests/kat_vectors, "philox4x32 10").
VECTORS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = st.integers(0, (1 << 64) - 1)
POSITIONS = st.integers(0, (1 << 64) - 1)
INDICES = st.integers(0, (1 << 32) - 1)

Four = tuple[int, int, int, int]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_ints_give_the_published_vectors(
    counter: Four, key: tuple[int, int], expected: Four
) -> None:
    assert philox4x32(counter, key) == expected


def test_int64_tensors_give_the_published_vectors() -> None:
    c0, c1, c2, c3 = torch.tensor([vector[0] for vector in VECTORS]).unbind(1)
    k0, k1 = torch.tensor([vector[1] for vector in VECTORS]).unbind(1)
    words = torch.stack(philox4x32((c0, c1, c2, c3), (k0, k1)), dim=1)
    assert words.tolist() == [list(vector[2]) for vector in VECTORS]


@given(st.lists(st.tuples(SEEDS, POSITIONS, INDICES), max_size=6))
@settings(max_examples=30, deadline=None)
def test_one_at_a_time_and_all_at_once_are_the_same_numbers(
    triples: list[tuple[int, int, int]],
) -> None:
    seeds, positions, indices = zip(*triples, strict=True) if triples else ((), (), ())
    together = uniforms(seeds, positions, indices)
    assert together.dtype == torch.float64
    assert together.tolist() == [uniform(*triple) for triple in triples]
    assert all(0.0 <= number < 1.0 for number in together.tolist())


def test_numbers_keep_to_the_documented_words() -> None:
    first, second, _, _ = philox4x32((5, 1, 3, 0), (0xCCCCDDDD, 0xAAAABBBB))
    expected = ((first << 32 | second) >> 11 << 11) / 2**64
    # 53 bits: 27 of the first word, 26 of the second.
    assert uniform(0xAAAABBBBCCCCDDDD, (1 << 32) + 5, 3) == pytest.approx(expected, abs=2**-26)
    assert uniform(1, 2, 3) * 2**53 == int(uniform(1, 2, 3) * 2**53)


@pytest.mark.parametrize("other", [(43, 7, 1), ((1 << 63) + 42, 7, 1), (42, 8, 1), (42, 7, 2)])
def test_seed_position_and_index_each_change_the_number(other: tuple[int, int, int]) -> None:
    assert uniform(*other) != uniform(42, 7, 1)


def test_numbers_are_spread_evenly() -> None:
    numbers = uniforms([11] * 20_000, range(20_000), [0] * 20_000)
    counts = torch.histc(numbers, bins=20, min=0.0, max=1.0)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 50.8  # the 1 - 1e-4 quantile for 19 degrees of freedom
    neighbours = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.03
