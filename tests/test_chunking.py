"""The chunk policy: learned sizes, the pause budget, its floor."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from asyncllm.scheduler.chunking import RECHECK_AFTER, TRIES, ChunkPolicy


def device(fixed_s: float, token_s: float, decode_s: float = 0.0) -> Callable[[int, int], float]:
    """Step times of a device: a fixed part, so much a prompt token, so much if it decodes."""
    return lambda prompt, decode: fixed_s + token_s * prompt + (decode_s if decode else 0.0)


def learn(
    policy: ChunkPolicy, seconds: Callable[[int, int], float], decoding: int, steps: int
) -> list[int]:
    chosen = []
    for _ in range(steps):
        size = policy.choose(decoding)
        policy.observe(size, decoding, seconds(size, decoding))
        chosen.append(size)
    return chosen


@pytest.mark.parametrize("best", [32, 64, 128, 256, 512])
def test_it_finds_the_fastest_size_whatever_that_is(best: int) -> None:
    policy = ChunkPolicy("auto", 150)

    def seconds(prompt: int, decode: int) -> float:
        return prompt / (1000.0 if prompt == best else 600.0)

    chosen = learn(policy, seconds, 0, 200)
    assert set(chosen[:5]) == {32, 64, 128, 256, 512}, "each is tried once at first"
    assert chosen[5 : 5 + RECHECK_AFTER // 2] == [best] * (RECHECK_AFTER // 2)
    assert chosen.count(best) > 180


def test_it_looks_at_the_neighbours_again_and_follows_a_device_that_changed() -> None:
    policy = ChunkPolicy("auto", 150)
    fast = {"size": 128}

    def seconds(prompt: int, decode: int) -> float:
        return prompt / (1000.0 if prompt == fast["size"] else 500.0)

    assert learn(policy, seconds, 0, 50)[-1] == 128
    fast["size"] = 256
    assert learn(policy, seconds, 0, 20 * RECHECK_AFTER)[-5:] == [256] * 5


def test_short_prompts_that_never_fill_a_size_do_not_keep_it_exploring() -> None:
    policy = ChunkPolicy("auto", 150)
    for _ in range(10 * TRIES):
        size = policy.choose(0)
        rows = min(size, 100)
        policy.observe(rows, 0, rows / (900 if rows == 64 else 300))
    assert policy.choose(0) == 64


def test_learned_sizes_stay_within_32_and_512() -> None:
    policy = ChunkPolicy("auto", 150)
    random_ = random.Random(1)
    for _ in range(1000):
        assert 32 <= policy.choose(0) <= 512 == policy.maximum
        rows = random_.randint(1, 512)
        policy.observe(rows, random_.choice([0, 3]), random_.random())


def test_the_largest_chunk_that_fits_the_budget_goes_while_something_decodes() -> None:
    policy = ChunkPolicy("auto", 150)
    seconds = device(0.010, 0.001, 0.020)  # 120 prompt tokens take 150 ms
    chosen = learn(policy, seconds, 2, 40)
    assert chosen[0] == 16, "nothing is known yet"
    assert all(seconds(size, 2) <= 0.151 for size in chosen), "no step overshoots on the way"
    assert chosen[-1] == 112


def test_a_budget_never_fits_less_than_the_floor() -> None:
    policy = ChunkPolicy("auto", 1)
    assert set(learn(policy, device(0.5, 0.01), 1, 30)) == {16}


def test_a_wide_budget_takes_the_largest_chunk() -> None:
    policy = ChunkPolicy("auto", 10_000)
    assert learn(policy, device(0.001, 0.0001), 1, 10)[-1] == 512


def test_prompt_steps_and_decode_steps_apart_foretell_a_mixed_step() -> None:
    policy = ChunkPolicy("auto", 150)
    for size in (32, 64, 128, 256):
        policy.observe(size, 0, 0.001 * size)
    policy.observe(0, 2, 0.050)
    assert policy.choose(2) == 96, "100 tokens and the decodes fill 150 ms"


def test_one_slow_step_is_forgotten() -> None:
    policy = ChunkPolicy("auto", 150)
    seconds = device(0.0, 0.001)
    learn(policy, seconds, 1, 20)
    policy.observe(140, 1, 30.0)
    assert policy.choose(1) < 140
    assert learn(policy, seconds, 1, 200)[-1] == 144


def test_a_slow_first_step_is_forgotten() -> None:
    policy = ChunkPolicy("auto", 150)
    policy.observe(16, 1, 30.0)
    assert policy.choose(1) == 16
    assert learn(policy, device(0.0, 0.001), 1, 100)[-1] == 144


def test_a_given_size_is_used_alone_and_bounds_the_budget() -> None:
    policy = ChunkPolicy(100, 150)
    assert policy.maximum == 100
    assert learn(policy, device(0.0, 1.0), 0, 10) == [100] * 10
    slow = ChunkPolicy(100, 150)
    assert learn(slow, device(0.0, 0.003), 1, 20)[-1] == 48
    fast = ChunkPolicy(100, 150)
    assert learn(fast, device(0.0, 0.0001), 1, 20)[-1] == 100


def test_a_given_size_below_the_floor_is_kept() -> None:
    policy = ChunkPolicy(5, 150)
    assert policy.choose(0) == policy.choose(3) == 5


def test_steps_without_a_time_teach_nothing() -> None:
    policy = ChunkPolicy("auto", 150)
    policy.observe(128, 0, 0.0)
    policy.observe(128, 2, 0.0)
    assert policy.choose(0) == 128
    assert policy.choose(2) == 16


def test_on_a_gpu_the_largest_size_comes_first_and_smaller_ones_only_to_be_looked_at_again() -> (
    None
):
    policy = ChunkPolicy("auto", 150, largest_first=True)
    sizes = []
    for _ in range(40):
        size = policy.choose(0)
        sizes.append(size)
        policy.observe(size, 0, 0.01 + size * 1e-5)  # the larger, the more tokens a second
    assert set(sizes[:32]) == {512}
    assert set(sizes[32:]) <= {256, 512}
