"""The sampler against plain numpy, alone and in company."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncllm.errors import RequestError
from asyncllm.options import SamplingParams
from asyncllm.sampling import filters
from asyncllm.sampling.filters import Filter, choose, ranked
from asyncllm.sampling.philox import uniform
from asyncllm.sampling.sampler import Sampled, Sampler, SamplingState, prompt_logprobs
from asyncllm.scheduler.step import SamplingSpec

Array = npt.NDArray[np.float64]
VOCAB = 40
INF = math.inf


def state(
    vocab: int = VOCAB,
    *,
    seed: int = 42,
    index: int = 0,
    prompt: Sequence[int] = (),
    end_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    output: Sequence[int] = (),
    **params: Any,
) -> SamplingState:
    spec = SamplingSpec(
        params=SamplingParams(**params).resolved({}),
        seed=seed,
        index=index,
        prompt_ids=list(prompt),
        end_ids=frozenset(end_ids),
        bad_words_ids=tuple(tuple(words) for words in bad_words),
    )
    made = SamplingState(spec, vocab)
    for token in output:
        made.append(token)
    return made


def some_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def one(logits: Tensor, of: SamplingState) -> Sampled:
    """What is chosen from logits [vocab] alone; the logits are kept."""
    (result,) = Sampler(len(logits)).sample(logits[None].clone(), [of])
    assert isinstance(result, Sampled), result
    return result


def fault(logits: Tensor, of: SamplingState) -> RequestError:
    (result,) = Sampler(len(logits)).sample(logits[None].clone(), [of])
    assert isinstance(result, RequestError), result
    return result


# The oracle: one row, in float64, straight from the definitions.


def probabilities(logits: Tensor, temperature: float) -> Array:
    scaled = logits.numpy().astype(np.float64) / temperature
    weights: Array = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    return weights


def smallest_set(p: Array, order: npt.NDArray[np.intp], share: float) -> Array:
    """Those of `p`, taken in this order, that it takes to reach the share; taken anew."""
    kept = np.zeros_like(p)
    reached = 0.0
    for token in order:
        if reached >= share:
            break
        kept[token] = p[token]
        reached += p[token]
    kept /= kept.sum()
    return kept


def expected(logits: Tensor, f: Filter) -> Array:
    """The filtered distribution."""
    p = probabilities(logits, f.temperature)
    order = np.lexsort((np.arange(len(p)), -logits.numpy().astype(np.float64)))
    p = np.where(p >= f.min_p * p.max(), p, 0.0)
    p[order[f.top_k :]] = 0.0
    p /= p.sum()
    if f.top_p < INF:
        p = smallest_set(p, order, f.top_p)
    if f.typical_p < INF:
        information = np.array([-math.log(x) if x > 0 else INF for x in p])
        entropy = sum(x * i for x, i in zip(p, information, strict=True) if x > 0)
        shift = np.abs(information - entropy)
        position = np.argsort(order)
        p = smallest_set(p, np.lexsort((position, shift)), f.typical_p)
    return p


def loosened(f: Filter, by: float) -> Filter:
    return Filter(f.temperature, f.top_k, f.top_p * by, f.min_p * by, f.typical_p * by)


FILTERS = st.builds(
    Filter,
    temperature=st.sampled_from([1e-5, 0.3, 0.7, 1.0, 1.9, 1e6]),
    top_k=st.sampled_from([1, 2, 5, 9, VOCAB]),
    top_p=st.sampled_from([INF, INF, 0.999, 0.9, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.9]),
    typical_p=st.sampled_from([INF, INF, 0.95, 0.6, 0.2, 1e-6]),
)
LOGITS = st.one_of(
    st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    st.lists(st.sampled_from([-INF, -1.0, -0.0, 0.0, 2.5]), min_size=VOCAB, max_size=VOCAB),
)


@pytest.mark.parametrize("candidates", [(1 << 10, 1 << 14), (4, 16), (1,)])
@given(values=LOGITS, several=st.lists(FILTERS, min_size=1, max_size=4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_filters_leave_and_choose_what_their_definitions_say(
    candidates: tuple[int, ...], values: list[float], several: list[Filter], data: st.DataObject
) -> None:
    logits = torch.tensor(values, dtype=torch.float32)
    assume(math.isfinite(float(logits.max())))
    numbers = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4))
    rows: list[tuple[Filter, float, int]] = []
    for f in several:
        p = expected(logits, f)
        # Rounding may decide either way where a sum meets a threshold exactly: not told apart here.
        for by in (1 - 1e-9, 1 + 1e-9):
            assume(np.array_equal(expected(logits, loosened(f, by)) > 0, p > 0))
        sums = p.cumsum()
        rows += [
            (f, number, int(np.searchsorted(sums, number, side="right")))
            for number in numbers
            if np.abs(sums - number).min() > 1e-9
        ]
    assume(rows)
    before = filters.CANDIDATES
    filters.CANDIDATES = candidates  # type: ignore[assignment]
    try:
        found = choose(
            logits.repeat(len(rows), 1), [row[0] for row in rows], [row[1] for row in rows]
        )
    finally:
        filters.CANDIDATES = before
    assert found == [row[2] for row in rows]


@given(LOGITS, st.integers(1, VOCAB))
@settings(max_examples=60, deadline=None)
def test_ranking_is_by_logit_and_then_by_id(values: list[float], count: int) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    by_hand = sorted(range(VOCAB), key=lambda token: (-float(logits[0, token]), token))
    assert ranked(logits, count).tolist() == [by_hand[:count]]


def test_equal_logits_leave_the_lowest_ids() -> None:
    logits = torch.zeros(8, 8)
    numbers = [number / 8 for number in range(8)]
    assert choose(logits, [Filter(1.0, 3, INF, 0.0, INF)] * 8, numbers) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert choose(logits, [Filter(1.0, 8, 0.5, 0.0, INF)] * 8, numbers) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_min_p_keeps_tokens_at_its_threshold() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0 - 1e-3, 1.0]])
    numbers = [number / 8 for number in range(8)]
    peaks = choose(logits.repeat(8, 1), [Filter(1.0, 4, INF, 1.0, INF)] * 8, numbers)
    assert peaks == [1, 1, 1, 1, 3, 3, 3, 3]
    near = choose(logits.repeat(8, 1), [Filter(1.0, 4, INF, 0.998, INF)] * 8, numbers)
    assert set(near) == {1, 2, 3}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "typical_p": 0.7},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
    ],
)
def test_choices_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    draws, vocab = 4000, 10
    logits = some_logits(vocab=vocab, seed=3)[0]
    states = [state(vocab, seed=seed, **params) for seed in range(draws)]
    results = Sampler(vocab).sample(logits.repeat(draws, 1), states)
    tokens = [result.token for result in results if isinstance(result, Sampled)]
    p = expected(logits, states[0].filter)
    counts = np.bincount(tokens, minlength=vocab)
    assert counts.sum() == draws
    assert counts[p == 0].sum() == 0
    kept = p > 0
    chi_square = ((counts - draws * p)[kept] ** 2 / (draws * p[kept])).sum()
    # Quantiles at 1 - 1e-4 for 1 to 9 degrees of freedom.
    bounds = [0.0, 15.1, 18.4, 21.1, 23.5, 25.7, 27.9, 29.9, 31.8, 33.7]
    assert chi_square < bounds[kept.sum() - 1]


def test_positions_of_one_sequence_draw_independently() -> None:
    sampler, vocab, draws = Sampler(4), 4, 2000
    of = state(vocab, temperature=1.0)
    for _ in range(draws):
        sampler.sample(torch.zeros(1, vocab), [of])
    pairs = np.zeros((vocab, vocab))
    for pair in zip(of.output_ids, of.output_ids[1:], strict=False):
        pairs[pair] += 1
    share = (draws - 1) / vocab**2
    assert ((pairs - share) ** 2 / share).sum() < 44.3  # 1 - 1e-4 quantile, 15 degrees


# Greedy


def test_greedy_takes_the_most_likely_token_the_first_of_equals() -> None:
    for vocab in (1, 7, 511, 512, 513, 1300):
        logits = some_logits(20, vocab, seed=vocab)
        assert [
            result.token
            for result in Sampler(vocab).sample(logits.clone(), [state(vocab) for _ in range(20)])
            if isinstance(result, Sampled)
        ] == logits.argmax(-1).tolist()
    tied = torch.zeros(1300)
    tied[[1299, 700, 650]] = 1.0
    assert one(tied, state(1300)).token == 650


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-300, 1e-9, 9e-6])
def test_temperatures_near_zero_are_greedy(temperature: float) -> None:
    logits = some_logits(spread=1e30)[0]
    assert one(logits, state(temperature=temperature)).token == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e30, 1e308])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    logits = some_logits(spread=1e30)[0]
    token = one(logits, state(temperature=temperature)).token
    if temperature < 1:
        assert token == int(logits.argmax())


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1, 1 << 31, 1 << 62])
def test_a_top_k_that_is_off_changes_nothing(top_k: int) -> None:
    logits = some_logits(2)
    both = [state(temperature=1.0, top_k=top_k), state()]
    results = Sampler(VOCAB).sample(logits.clone(), both)
    alone = one(logits[0], state(temperature=1.0))
    assert results == [alone, one(logits[1], state())]


def test_top_k_of_one_is_greedy_whatever_the_temperature() -> None:
    logits = torch.zeros(VOCAB)
    logits[[9, 30]] = 1.0
    assert one(logits, state(temperature=100.0, top_k=1)).token == 9


# Sick rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("sickness", "words"),
    [(math.nan, "NaN"), (-INF, "all -inf"), (INF, "infinite")],
)
def test_a_sick_row_fails_alone(temperature: float, sickness: float, words: str) -> None:
    logits = some_logits(3)
    if sickness == -INF:
        logits[1] = -INF
    else:
        logits[1, 17] = sickness
    states = [state(seed=row, temperature=temperature, top_k=5) for row in range(3)]
    before, ill, after = Sampler(VOCAB).sample(logits.clone(), states)
    assert isinstance(ill, RequestError)
    assert words in str(ill)
    assert states[1].output_ids == []
    assert before == one(logits[0], state(seed=0, temperature=temperature, top_k=5))
    assert after == one(logits[2], state(seed=2, temperature=temperature, top_k=5))


def test_nan_is_found_wherever_it_lies() -> None:
    for place in (0, 511, 512, 1023, 1024, 1299):
        logits = some_logits(vocab=1300)[0]
        logits[place] = math.nan
        assert "NaN" in str(fault(logits, state(1300)))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: token id {VOCAB}"),
        ({"logit_bias": {3: 1.0, 1 << 40: 1.0}}, f"logit_bias: token id {1 << 40}"),
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids: token id {VOCAB}"),
        ({"prompt": [1, VOCAB + 2]}, f"prompt: token id {VOCAB + 2}"),
    ],
)
def test_ids_outside_the_vocabulary_fail_that_row(params: dict[str, Any], words: str) -> None:
    logits = some_logits(2)
    at_fault = state(**params)
    good, bad = Sampler(VOCAB).sample(logits.clone(), [state(), at_fault])
    assert isinstance(bad, RequestError)
    assert str(bad).startswith(words)
    assert f"0 to {VOCAB - 1}" in str(bad)
    assert good == one(logits[0], state())
    assert at_fault.output_ids == []


def test_logits_of_another_shape_or_type_are_refused() -> None:
    sampler = Sampler(VOCAB)
    with pytest.raises(ValueError, match=r"\[1, 39\].*expected is \[1, 40\]"):
        sampler.sample(torch.zeros(1, VOCAB - 1), [state()])
    with pytest.raises(ValueError, match="float64"):
        sampler.sample(torch.zeros(1, VOCAB, dtype=torch.float64), [state()])
    assert sampler.sample(torch.zeros(0, VOCAB), []) == []


# Penalties


def penalised(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], r: float, p: float, f: float
) -> Array:
    row = logits.numpy().astype(np.float64).copy()
    for token in {*prompt, *output}:
        row[token] = row[token] / r if row[token] > 0 else row[token] * r
    for token in output:
        row[token] -= f
    for token in set(output):
        row[token] -= p
    return row


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=30),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    r=st.sampled_from([1.0, 1.3, 0.7, 5.0]),
    p=st.sampled_from([0.0, 0.5, -1.5]),
    f=st.sampled_from([0.0, 0.25, -0.75]),
    seed=st.integers(0, 100),
)
@settings(max_examples=80, deadline=None)
def test_penalties_are_as_defined_at_every_token(
    prompt: list[int], output: list[int], r: float, p: float, f: float, seed: int
) -> None:
    params: dict[str, Any] = {
        "repetition_penalty": r,
        "presence_penalty": p,
        "frequency_penalty": f,
    }
    going = state(prompt=prompt, **params)
    for count in range(len(output) + 1):
        logits = some_logits(seed=seed + count)[0]
        row = logits.clone()
        going.edit(row)
        by_hand = penalised(logits, prompt, output[:count], r, p, f)
        np.testing.assert_allclose(row.numpy(), by_hand, rtol=1e-5, atol=1e-5)
        if count < len(output):
            going.append(output[count])


def test_the_token_just_chosen_is_penalised_next() -> None:
    logits = torch.zeros(VOCAB)
    logits[[4, 8]] = torch.tensor([2.0, 1.5])
    for of in (state(repetition_penalty=2.0), state(presence_penalty=1.0)):
        assert [one(logits, of).token for _ in range(2)] == [4, 8]


def test_penalties_leave_ruled_out_tokens_ruled_out() -> None:
    logits = torch.full((VOCAB,), -INF)
    logits[3] = -1.0
    of = state(prompt=[2, 3], repetition_penalty=1.5, presence_penalty=-9.0, output=[2, 3])
    assert one(logits, of).token == 3


def test_a_penaltys_cost_does_not_grow_with_the_context() -> None:
    vocab = 5000
    logits = some_logits(vocab=vocab)
    timings = []
    for length in (10, 200_000):
        of = state(
            vocab,
            prompt=[token % vocab for token in range(length)],
            repetition_penalty=1.1,
            frequency_penalty=0.1,
        )
        sampler = Sampler(vocab)
        sampler.sample(logits.clone(), [of])
        samples = []
        for _ in range(20):
            row = logits.clone()
            start = time.perf_counter()
            sampler.sample(row, [of])
            samples.append(time.perf_counter() - start)
        timings.append(min(samples))
    # Touching 200,000 ids takes several ms, the whole call some 0.2 ms.
    assert timings[1] < 3 * timings[0] + 1e-3


# min_tokens, bias, bad words


def test_end_tokens_are_out_of_reach_before_min_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[[5, 6, 7]] = torch.tensor([9.0, 8.0, 7.0])
    of = state(min_tokens=2, end_ids=[5, 6, VOCAB + 3], stop_token_ids=[6])
    assert [one(logits, of).token for _ in range(4)] == [7, 7, 5, 5]


def test_min_tokens_holds_against_bias_and_processors() -> None:
    def insist(_ids: Sequence[int], row: Tensor) -> Tensor:
        row[5] = 1e30
        return row

    of = state(min_tokens=1, end_ids=[5], logit_bias={5: 1e30}, logits_processors=[insist])
    logits = some_logits()[0]
    assert one(logits, of).token != 5
    assert one(logits, of).token == 5


def test_bias_is_added_and_may_rule_out() -> None:
    logits = torch.zeros(VOCAB)
    assert one(logits, state(logit_bias={7: 1.0, 9: 0.5})).token == 7
    assert one(logits, state(logit_bias={token: -INF for token in range(12)})).token == 12
    row = some_logits()[0]
    changed = row.clone()
    state(logit_bias={0: -1.5, VOCAB - 1: 3}).edit(changed)
    assert (changed - row).nonzero().flatten().tolist() == [0, VOCAB - 1]
    assert float(changed[0] - row[0]) == pytest.approx(-1.5)


def test_a_bias_beyond_float32_favours_and_bans_all_the_same() -> None:
    logits = some_logits()[0]
    assert one(logits, state(logit_bias={11: 1e300})).token == 11
    assert one(logits, state(temperature=1.0, logit_bias={11: 1e300})).token == 11
    best = int(logits.argmax())
    assert one(logits, state(temperature=1.0, logit_bias={best: -1e300})).token != best


def test_a_bad_words_last_token_is_blocked_when_the_others_precede_it() -> None:
    logits = torch.zeros(VOCAB)
    logits[[1, 2, 3]] = torch.tensor([3.0, 2.0, 1.0])
    assert one(logits, state(bad_words=[[1]])).token == 2
    assert one(logits, state(bad_words=[[8, 9, 1]], output=[9, 8, 9])).token == 2
    assert one(logits, state(bad_words=[[8, 9, 1]], output=[8, 9, 9])).token == 1
    assert one(logits, state(bad_words=[[8, 9, 1]], output=[9])).token == 1
    assert one(logits, state(bad_words=[[8, 1], [1], [7, 2]], output=[8])).token == 2
    assert one(logits, state(bad_words=[[], [VOCAB]])).token == 1
    # Only the output counts: a word begun in the prompt does not appear in the text.
    assert one(logits, state(bad_words=[[8, 1]], prompt=[8])).token == 1


def test_ruling_out_every_token_fails_that_request_alone() -> None:
    logits = some_logits(2)
    everything = {token: -INF for token in range(VOCAB)}
    good, bad = Sampler(VOCAB).sample(
        logits.clone(), [state(temperature=1.0), state(temperature=1.0, logit_bias=everything)]
    )
    assert isinstance(bad, RequestError)
    assert "logit_bias" in str(bad)
    assert "no token is left" in str(bad)
    assert good == one(logits[0], state(temperature=1.0))


# Callables


def test_processors_see_ids_and_logits_and_run_in_turn() -> None:
    seen: list[tuple[list[int], Tensor]] = []

    def keep_even(ids: Sequence[int], row: Tensor) -> Tensor:
        seen.append((list(ids), row.clone()))
        row[1::2] = -INF
        return row

    def shift(ids: Sequence[int], row: Tensor) -> Tensor:
        assert bool((row[1::2] == -INF).all())
        return torch.where(torch.arange(VOCAB) == len(ids), 99.0, row)

    logits = some_logits()[0]
    of = state(prompt=[3, 1], output=[4, 2], logits_processors=[keep_even, shift])
    assert one(logits, of).token == 4
    assert seen[0][0] == [3, 1, 4, 2]
    assert seen[0][1].dtype == torch.float32
    assert torch.equal(seen[0][1], logits)
    one(logits, of)
    assert seen[1][0] == [3, 1, 4, 2, 4]


def explode(_ids: Sequence[int], _row: Tensor) -> Tensor:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (explode, "raised KeyError: 'gone'"),
        (lambda _ids, row: row[:-1], "returned a tensor [39]"),
        (lambda _ids, row: row[None], "returned a tensor [1, 40]"),
        (lambda _ids, row: row.double(), "torch.float64"),
        (lambda _ids, row: row.tolist(), "returned list"),
        (lambda _ids, row: None, "returned NoneType"),
        (lambda _ids, row: row * math.nan, "a logit that is nan"),
        (lambda _ids, row: row - INF, "only -inf"),
        (lambda _ids, row: row + INF, "a logit that is inf"),
        (lambda _ids, row: row.to_sparse(), "torch.sparse_coo"),
        (lambda _ids, row: row.to("meta"), "on meta"),
        (lambda row: row, "raised TypeError"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_at_fault_fails_its_request_alone(
    processor: Callable[..., Any], words: str, temperature: float
) -> None:
    logits = some_logits(3)
    wrong = state(
        temperature=temperature, logits_processors=[lambda _ids, row: row, processor], output=[1]
    )
    states = [state(temperature=temperature), wrong, state(presence_penalty=1.0)]
    before, bad, after = Sampler(VOCAB).sample(logits.clone(), states)
    assert isinstance(bad, RequestError)
    assert "logits_processors[1]" in str(bad)
    assert words in str(bad)
    assert wrong.output_ids == [1]
    assert isinstance(bad.__cause__, KeyError) == (processor is explode)
    assert before == one(logits[0], state(temperature=temperature))
    assert after == one(logits[2], state(presence_penalty=1.0))


def test_what_a_processor_keeps_and_changes_is_its_own() -> None:
    kept: list[Any] = []

    def meddle(ids: Any, row: Tensor) -> Tensor:
        kept.append(row)
        ids.clear()
        for old in kept:
            old.fill_(-INF)
        result = torch.zeros(VOCAB, requires_grad=True)
        return result + torch.arange(VOCAB)

    of = state(prompt=[1, 2], logits_processors=[meddle])
    logits = some_logits()[0]
    assert [one(logits, of).token for _ in range(2)] == [VOCAB - 1] * 2
    assert list(of.spec.prompt_ids) == [1, 2]


def test_a_row_that_a_processor_keeps_stays_the_models_own() -> None:
    kept: list[Tensor] = []

    def look(_ids: Sequence[int], row: Tensor) -> Tensor:
        kept.append(row)
        return row

    logits = some_logits()[0]
    one(logits, state(logits_processors=[look], logit_bias={3: 9.0}))
    assert torch.equal(kept[0], logits)


# Log-probabilities


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = some_logits(3)
    reference = torch.log_softmax(logits.double(), -1)
    states = [
        state(temperature=5.0, top_k=2, logprobs=3, presence_penalty=4.0, output=[5]),
        state(),
        state(logprobs=0, logit_bias={7: 50.0}),
    ]
    first, second, third = Sampler(VOCAB).sample(logits.clone(), states)
    assert isinstance(first, Sampled)
    assert first.logprob is not None
    assert first.logprob.token_id == first.token
    assert first.logprob.logprob == pytest.approx(float(reference[0, first.token]), abs=1e-5)
    values, ids = reference[0].topk(3)
    assert [token for token, _ in first.logprob.top] == ids.tolist()
    assert [value for _, value in first.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert isinstance(second, Sampled)
    assert second.logprob is None
    assert isinstance(third, Sampled)
    assert third.token == 7
    assert third.logprob is not None
    assert third.logprob.logprob == pytest.approx(float(reference[2, 7]), abs=1e-5)
    assert third.logprob.top == ()


def test_logprobs_above_the_vocabulary_are_all_of_it() -> None:
    result = one(some_logits()[0], state(logprobs=VOCAB + 100))
    assert result.logprob is not None
    assert sorted(token for token, _ in result.logprob.top) == list(range(VOCAB))
    total = math.fsum(math.exp(value) for _, value in result.logprob.top)
    assert total == pytest.approx(1.0, abs=1e-5)


def test_prompt_logprobs_are_those_of_the_tokens_that_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = some_logits(7)
    following = [3, 0, 39, 3, 8, 1, 2]
    whole = prompt_logprobs(logits, following, 2)
    monkeypatch.setattr("asyncllm.sampling.sampler.SLAB_ELEMENTS", 2 * VOCAB)
    assert prompt_logprobs(logits, following, 2) == whole
    reference = torch.log_softmax(logits.double(), -1)
    for row, (token, found) in enumerate(zip(following, whole, strict=True)):
        assert found.token_id == token
        assert found.logprob == pytest.approx(float(reference[row, token]), abs=1e-5)
        assert [top for top, _ in found.top] == reference[row].topk(2).indices.tolist()
    assert prompt_logprobs(logits[:0], [], 2) == []
    assert len(prompt_logprobs(logits, following, VOCAB + 5)[0].top) == VOCAB
    with pytest.raises(ValueError, match="7 rows of logits, but 1 tokens"):
        prompt_logprobs(logits, [1], 0)


# Alone, in company, after preemption

MIX: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.2, "typical_p": 0.8, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 0.4},
    {"presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 0.9, "top_k": 3, "min_tokens": 5},
]


def scripted(row: int, position: int, vocab: int) -> Tensor:
    """What a model would say of request `row` at a position."""
    return some_logits(vocab=vocab, seed=1000 * row + position)[0]


def mixed_state(row: int, vocab: int) -> SamplingState:
    return state(vocab, seed=row, index=row % 3, prompt=[row, 1], end_ids=[2], **MIX[row])


@pytest.mark.parametrize("vocab", [VOCAB, 3000])
@given(st.permutations(range(len(MIX))), st.integers(1, len(MIX)))
@settings(max_examples=8, deadline=None)
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(
    vocab: int, order: list[int], count: int
) -> None:
    sampler, tokens = Sampler(vocab), 6
    rows = order[:count]
    together = [mixed_state(row, vocab) for row in rows]
    results: dict[int, list[Any]] = {row: [] for row in rows}
    for position in range(tokens):
        logits = torch.stack([scripted(row, position, vocab) for row in rows])
        for row, result in zip(rows, sampler.sample(logits, together), strict=True):
            results[row].append(result)
    for row in rows:
        alone = mixed_state(row, vocab)
        assert results[row] == [one(scripted(row, p, vocab), alone) for p in range(tokens)]


@pytest.mark.parametrize("row", range(len(MIX)))
def test_a_rebuilt_state_goes_on_as_if_never_stopped(row: int) -> None:
    whole = mixed_state(row, VOCAB)
    expected_tokens = [one(scripted(row, p, VOCAB), whole).token for p in range(8)]
    rebuilt = mixed_state(row, VOCAB)
    for token in expected_tokens[:3]:
        rebuilt.append(token)
    assert [one(scripted(row, p, VOCAB), rebuilt).token for p in range(3, 8)] == expected_tokens[3:]


def test_the_choice_is_the_inverse_distribution_at_the_philox_number() -> None:
    logits = some_logits()[0]
    of = state(seed=7, index=2, temperature=1.0, output=[1, 2, 3])
    sums = probabilities(logits, 1.0).cumsum()
    wanted = int(np.searchsorted(sums, uniform(7, 3, 2), side="right"))
    assert one(logits, of).token == wanted
    assert of.output_ids == [1, 2, 3, wanted]


def test_outputs_of_one_request_differ_by_their_index() -> None:
    sampler = Sampler(VOCAB)
    states = [state(temperature=1.0, index=index) for index in range(4)]
    for position in range(12):
        sampler.sample(scripted(0, position, VOCAB).repeat(4, 1), states)
    assert len({tuple(of.output_ids) for of in states}) == 4


def test_a_greedy_batch_of_64_over_a_vocabulary_of_262144_is_quick() -> None:
    rows, vocab = 64, 262_144
    sampler = Sampler(vocab)
    states = [state(vocab) for _ in range(rows)]
    logits = some_logits(rows, vocab)
    best = INF
    for _ in range(5):
        start = time.perf_counter()
        results = sampler.sample(logits, states)
        best = min(best, time.perf_counter() - start)
    wanted = logits.argmax(-1).tolist()
    assert [r.token for r in results if isinstance(r, Sampled)] == wanted
    assert best < 0.1  # some 5 ms on two free cores


def test_a_temperature_that_float32_weights_cannot_tell_is_for_the_sampler() -> None:
    for temperature, drawn in ((0.0, True), (2.0, True), (1e4, True), (1e5, False)):
        assert (state(temperature=temperature).draw is not None) == drawn
