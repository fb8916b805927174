"""The plain runner under the real scheduler and cache: what a request gets never depends on others.

Every scenario is held against transformers as well: the log-probability of each token given.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.checkpoint.checkpoint import open_checkpoint
from asyncllm.errors import RequestError
from asyncllm.kv.blocks import KvCache
from asyncllm.kv.pool import KvPool, layer_groups
from asyncllm.loading import _throwaway_steps
from asyncllm.model.causal_lm import CausalLM
from asyncllm.model.config import ModelConfig
from asyncllm.options import SamplingParams
from asyncllm.runner.plain import PlainRunner
from asyncllm.runner.runner import LOGITS_ROWS
from asyncllm.scheduler.chunking import ChunkPolicy
from asyncllm.scheduler.request import Request, State
from asyncllm.scheduler.scheduler import Scheduler
from asyncllm.scheduler.step import (
    Row,
    SamplingSpec,
    StepInterrupted,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from tests.tiny_models import CONTEXT, VOCABULARY, Tinies, allocated_bytes

BLOCK_TOKENS = 8
NAMES = pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])


class Loop:
    """The engine thread's loop without a thread, around a tiny model."""

    def __init__(
        self,
        path: Path,
        *,
        chunk: int = 64,
        blocks: int | None = None,
        max_seqs: int = 8,
        prefix_cache: bool = False,
        vocab_size: int = VOCABULARY,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        with open_checkpoint(path) as checkpoint:
            config = ModelConfig.from_checkpoint(checkpoint)
            model = CausalLM.bind(checkpoint, config)
        groups = layer_groups(
            config,
            block_tokens=BLOCK_TOKENS,
            chunk=chunk,
            max_seqs=max_seqs,
            context_length=CONTEXT,
            kv_bytes=1 << 40,
            dtype=torch.float32,
        )
        if blocks is not None:
            groups = tuple(replace(g, capacity=blocks) if g.window is None else g for g in groups)
        self.pool = KvPool(
            groups,
            block_tokens=BLOCK_TOKENS,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
        )
        for buffer in (*self.pool.keys.values(), *self.pool.values.values()):
            buffer.fill_(torch.nan)  # until it is written
        self.runner = PlainRunner(
            model,
            self.pool,
            vocab_size=vocab_size,
            max_rows=chunk + max_seqs,
            should_stop=should_stop,
        )
        self.cache = KvCache(
            groups,
            block_tokens=BLOCK_TOKENS,
            max_chunk=chunk,
            grow=self.runner.grow,
            fingerprint=b"tiny",
            prefix_cache=prefix_cache,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_seqs=max_seqs,
            context_length=CONTEXT,
            chunk=ChunkPolicy(chunk, 1e9),
            decode_refusal=self.runner.decode_refusal,
        )
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.scores: dict[int, list[TokenLogprob]] = {}
        self.errors: dict[int, Exception] = {}

    def request(self, prompt: Sequence[int], max_tokens: int = 12, **params: Any) -> Request:
        given = {"max_tokens": max_tokens, "logprobs": 2, "ignore_eos": True} | params
        seed = given.pop("seed", 0)
        sampling = SamplingParams().updated(given).resolved({})
        request = Request("r", prompt, sampling, seed=seed, end_ids=frozenset())
        self.scheduler.add(request)
        return request

    def step(self) -> StepResult:
        plan = self.scheduler.plan()
        assert isinstance(plan, StepPlan), plan
        result = self.runner.collect(self.runner.submit(plan))
        for emission in self.scheduler.commit(result, {}):
            key = emission.sequence.sequence_id
            if emission.logprob is not None:
                self.logprobs.setdefault(key, []).append(emission.logprob)
            self.scores.setdefault(key, []).extend(emission.prompt_logprobs)
            if emission.sequence.error is not None:
                self.errors[key] = emission.sequence.error
        return result

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step()
        self.scheduler.check()
        assert self.cache.blocks_used == 0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for each other on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> Tinies:
    return Tinies(tmp_path_factory.mktemp("tiny"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


# Lengths that end inside a block, at its end, and after the windows of 24.
PROMPTS = [prompt(n, n) for n in (1, 8, 21, 33, 64, 65, 90, 100)]


def sampling(number: int) -> dict[str, Any]:
    """Greedy and seeded rows beside each other."""
    return {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}


def outputs(request: Request) -> list[list[int]]:
    return [sequence.output_ids for sequence in request.sequences]


def assert_as_transformers(tinies: Tinies, name: str, loop: Loop, *requests: Request) -> None:
    for request in requests:
        size = len(request.prompt_ids)
        for sequence in request.sequences:
            assert sequence.state is State.FINISHED
            expected = tinies.logits(name, [*request.prompt_ids, *sequence.output_ids]).log_softmax(
                -1
            )
            given = loop.logprobs[sequence.sequence_id]
            assert [each.token_id for each in given] == sequence.output_ids
            for at, each in enumerate(given, size - 1):
                assert each.logprob == pytest.approx(expected[at, each.token_id].item(), abs=2e-3)
                if request.params.temperature == 0.0:
                    assert each.logprob == each.top[0][1]


@pytest.fixture(scope="module")
def alone(tinies: Tinies) -> Callable[[str], list[list[list[int]]]]:
    """What each prompt gets with the machine to itself."""

    @cache
    def get(name: str) -> list[list[list[int]]]:
        loop, found = Loop(tinies.path(name)), []
        for number, tokens in enumerate(PROMPTS):
            request = loop.request(tokens, **sampling(number))
            loop.run()
            found.append(outputs(request))
            assert_as_transformers(tinies, name, loop, request)
        return found

    return get


Alone = Callable[[str], list[list[list[int]]]]


@NAMES
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_tokens_are_the_same_in_company_with_any_chunk_size(
    tinies: Tinies, alone: Alone, name: str, chunk: int
) -> None:
    loop = Loop(tinies.path(name), chunk=chunk)
    requests = [loop.request(tokens, **sampling(i)) for i, tokens in enumerate(PROMPTS)]
    loop.run()
    assert [outputs(request) for request in requests] == alone(name)
    assert_as_transformers(tinies, name, loop, *requests)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_tokens_are_the_same_after_preemption(
    tinies: Tinies, alone: Alone, name: str, chunk: int
) -> None:
    loop = Loop(tinies.path(name), chunk=chunk, blocks=8)
    requests = [loop.request(tokens, **sampling(i)) for i, tokens in enumerate(PROMPTS[:4])]
    loop.run()
    assert loop.scheduler.preempted > 0
    assert loop.scheduler.resumed == loop.scheduler.preempted
    assert [outputs(request) for request in requests] == alone(name)[:4]
    assert_as_transformers(tinies, name, loop, *requests)


@NAMES
@pytest.mark.parametrize("chunk", [7, 64])
def test_tokens_are_the_same_after_a_prefix_hit(
    tinies: Tinies, alone: Alone, name: str, chunk: int
) -> None:
    loop = Loop(tinies.path(name), chunk=chunk, prefix_cache=True)
    for _ in range(2):
        requests = [loop.request(tokens, **sampling(i)) for i, tokens in enumerate(PROMPTS)]
        loop.run()
        assert [outputs(request) for request in requests] == alone(name)
        assert_as_transformers(tinies, name, loop, *requests)
    assert loop.cache.prefix_hit_tokens > 100
    longest = requests[-1].sequences[0]
    assert longest.cached_tokens == 96


@NAMES
def test_a_prompt_of_whole_blocks_hits_all_it_may(tinies: Tinies, name: str) -> None:
    loop = Loop(tinies.path(name), prefix_cache=True)
    tokens = prompt(5 * BLOCK_TOKENS)
    first, second = loop.request(tokens), None
    loop.run()
    second = loop.request(tokens)
    loop.run()
    third = loop.request([*tokens, 3])
    loop.run()
    assert outputs(first) == outputs(second)
    cached = [request.sequences[0].cached_tokens for request in (first, second, third)]
    assert cached == [0, 4 * BLOCK_TOKENS, 5 * BLOCK_TOKENS]
    assert_as_transformers(tinies, name, loop, first, second, third)


@NAMES
@pytest.mark.parametrize("length", [16, 21, 45])
def test_forks_share_the_prompt_and_part_after_it(tinies: Tinies, name: str, length: int) -> None:
    loop = Loop(tinies.path(name), chunk=16)
    tokens = prompt(length, 3)
    forked = loop.request(tokens, n=3, temperature=1.5, seed=11)
    other = loop.request(PROMPTS[3], temperature=0.0)
    single = loop.request(tokens, temperature=1.5, seed=11)
    loop.run()
    texts = outputs(forked)
    assert len({tuple(text) for text in texts}) == 3
    assert texts[0] == outputs(single)[0]
    assert_as_transformers(tinies, name, loop, forked, other, single)


def test_more_sequences_than_logits_are_made_at_a_time(tinies: Tinies) -> None:
    many = LOGITS_ROWS + 9
    loop = Loop(tinies.path("llama"), max_seqs=many)
    requests = [loop.request(prompt(5 + i, i), 4, **sampling(i)) for i in range(many)]
    loop.run()
    assert_as_transformers(tinies, "llama", loop, *requests)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_scores_are_those_of_transformers(tinies: Tinies, chunk: int) -> None:
    loop = Loop(tinies.path("gemma3"), chunk=chunk)
    tokens = prompt(90, 8)
    request, other = loop.request(tokens, prompt_logprobs=2), loop.request(PROMPTS[2])
    loop.run()
    scores = loop.scores[request.sequences[0].sequence_id]
    expected = tinies.logits("gemma3", tokens).log_softmax(-1)
    assert [score.token_id for score in scores] == tokens[1:]
    for at, score in enumerate(scores):
        assert score.logprob == pytest.approx(expected[at, tokens[at + 1]].item(), abs=2e-3)
        assert score.top[0][1] == pytest.approx(expected[at].amax().item(), abs=2e-3)
        assert len(score.top) == 2
    assert_as_transformers(tinies, "gemma3", loop, request, other)


# Faults


def test_a_processor_that_raises_fails_its_own_request_alone(tinies: Tinies, alone: Alone) -> None:
    def broken(ids: Sequence[int], logits: Tensor) -> Tensor:
        if len(ids) > len(PROMPTS[2]) + 2:
            raise LookupError("no such word")
        return logits

    loop = Loop(tinies.path("llama"))
    bad = loop.request(PROMPTS[2], logits_processors=[broken])
    good = [loop.request(tokens, **sampling(i)) for i, tokens in enumerate(PROMPTS)]
    loop.run()
    [sequence] = bad.sequences
    assert sequence.state is State.FAILED
    assert len(sequence.output_ids) == 3
    assert isinstance(sequence.error, RequestError)
    assert "LookupError: no such word" in str(sequence.error)
    assert [outputs(request) for request in good] == alone("llama")


@NAMES
def test_logits_that_are_no_numbers_fail_their_own_request_alone(
    tinies: Tinies, alone: Alone, name: str
) -> None:
    loop = Loop(tinies.path(name), max_seqs=9)
    bad = loop.request(prompt(40, 99), 30)
    good = [loop.request(tokens, **sampling(i)) for i, tokens in enumerate(PROMPTS)]
    [sequence] = bad.sequences
    while len(sequence.output_ids) < 2:
        loop.step()
    held = sequence.blocks
    assert held is not None
    for index, group in enumerate(loop.pool.groups):
        numbers = range(held.first[index], held.last[index])
        blocks = [held.entry(index, loop.cache.rings[index], number) for number in numbers]
        for layer in group.layers:
            loop.pool.values[layer][blocks] = torch.nan
    loop.run()
    assert sequence.state is State.FAILED
    assert "NaN" in str(sequence.error)
    assert [outputs(request) for request in good] == alone(name)
    # Nor does who gets the blocks next see any of it.
    after = [loop.request(tokens, **sampling(i)) for i, tokens in enumerate(PROMPTS)]
    loop.run()
    assert [outputs(request) for request in after] == alone(name)


def test_a_step_ends_between_layers_when_the_engine_does(tinies: Tinies) -> None:
    asked: list[bool] = []

    def should_stop() -> bool:
        asked.append(len(asked) == 4)
        return asked[-1]

    loop = Loop(tinies.path("llama"), should_stop=should_stop)
    loop.request(PROMPTS[3])
    loop.step()
    with pytest.raises(StepInterrupted, match="before layer 1"):
        loop.step()
    assert len(asked) == 5


# Plans by hand


def row(loop: Loop, tokens: Sequence[int], sequence_id: int, **changes: Any) -> Row:
    """A prompt's only row, in blocks of its own."""
    params = SamplingParams(max_tokens=9).resolved({})
    spec = SamplingSpec(params, 0, 0, tuple(tokens), frozenset())
    tables = tuple(tuple(range(4 * sequence_id, 4 * sequence_id + 4)) for _ in loop.pool.groups)
    made = Row(sequence_id, 0, 0, len(tokens), tokens, False, tables, True, 0, spec)
    return replace(made, **changes)


def test_a_plan_without_rows_is_no_work(tinies: Tinies) -> None:
    runner = Loop(tinies.path("llama")).runner
    result = runner.collect(runner.submit(StepPlan((), released=(5, 6))))
    assert result.rows == ()
    assert result.model_s >= 0


def test_a_chained_row_takes_the_token_of_the_step_before(tinies: Tinies) -> None:
    found = []
    for chained in (False, True):
        loop = Loop(tinies.path("llama"))
        first, beside = row(loop, prompt(9), 1), row(loop, prompt(5), 2)
        results = loop.runner.submit(StepPlan((first, beside))).rows
        tokens = [[result.token for result in results]]
        for step in range(3):
            rows = tuple(
                replace(
                    each,
                    offset=len(each.sampling.prompt_ids) + step,
                    count=1,
                    tokens=() if chained else (token or 0,),
                    chained=chained,
                    output_count=step + 1,
                )
                for each, token in zip((first, beside), tokens[-1], strict=True)
            )
            tokens.append([result.token for result in loop.runner.submit(StepPlan(rows)).rows])
        found.append(tokens)
    assert found[0] == found[1]


def test_a_row_chained_to_one_that_failed_disturbs_nobody(tinies: Tinies) -> None:
    def broken(ids: Sequence[int], logits: Tensor) -> Tensor:
        raise LookupError

    answers = []
    for fails in (False, True):
        loop = Loop(tinies.path("llama"))
        first, beside = row(loop, prompt(9), 1), row(loop, prompt(5), 2)
        if fails:
            params = replace(first.sampling.params, logits_processors=[broken])
            first = replace(first, sampling=replace(first.sampling, params=params))
        [failed, _] = loop.runner.submit(StepPlan((first, beside))).rows
        assert (failed.error is not None) == fails
        again = tuple(
            replace(each, offset=each.count, count=1, tokens=(), chained=True, output_count=1)
            for each in (first, beside)
        )
        answers.append(loop.runner.submit(StepPlan(again)).rows[1].token)
    assert answers[0] == answers[1]


def test_copies_run_before_the_rows(tinies: Tinies) -> None:
    from asyncllm.scheduler.step import BlockCopy

    loop, tokens = Loop(tinies.path("llama")), prompt(6)
    expected = loop.runner.submit(StepPlan((row(loop, tokens, 1),))).rows[0].token
    again = replace(row(loop, tokens, 2), offset=5, count=1, tokens=tokens[5:])
    plan = StepPlan((again,), copies=(BlockCopy(0, 4, 8),))
    assert loop.runner.submit(plan).rows[0].token == expected


def test_released_sequences_are_forgotten(tinies: Tinies) -> None:
    loop = Loop(tinies.path("llama"))

    def processor(ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits

    gone = weakref.ref(processor)
    made = row(loop, prompt(4), 1)
    params = replace(made.sampling.params, logits_processors=[processor])
    made = replace(made, sampling=replace(made.sampling, params=params))
    loop.runner.submit(StepPlan((made,)))
    del made, params, processor
    gc.collect()
    assert gone() is not None
    loop.runner.submit(StepPlan((), released=(1,)))
    gc.collect()
    assert gone() is None


def test_tokens_that_only_pad_the_embedding_are_never_chosen_nor_scored(tinies: Tinies) -> None:
    chosen = {}
    for size in (VOCABULARY, 60):
        loop = Loop(tinies.path("llama"), vocab_size=size)
        tokens = [token % 60 for token in PROMPTS[3]]
        request = loop.request(
            tokens, 60, temperature=50.0, seed=4, logprobs=size, prompt_logprobs=size
        )
        loop.run()
        key = request.sequences[0].sequence_id
        chosen[size] = {token for text in outputs(request) for token in text}
        for each in (*loop.logprobs[key], *loop.scores[key]):
            assert sorted(token for token, _ in each.top) == list(range(size))
            total = sum(torch.tensor([value for _, value in each.top]).exp().tolist())
            assert total == pytest.approx(1.0, abs=1e-4)
    assert max(chosen[VOCABULARY]) >= 60
    assert max(chosen[60]) < 60


def test_a_decode_step_allocates_the_same_after_many_steps(tinies: Tinies) -> None:
    loop = Loop(tinies.path("gemma3"))
    for number in range(2):
        request = loop.request(prompt(50), 160, logprobs=None, **sampling(number))
    [sequence] = request.sequences

    def at(count: int) -> int:
        while len(sequence.output_ids) < count:
            loop.step()
        return min(allocated_bytes(loop.step)[0] for _ in range(3))

    at(5)
    early, late = at(10), at(140)
    assert abs(late - early) < 2 * 2 * 8 * 140 // BLOCK_TOKENS  # the blocks' own numbers


def test_the_throwaway_steps_at_load_need_no_more_pool_than_there_is(tinies: Tinies) -> None:
    loop = Loop(tinies.path("gemma3"), blocks=2)
    _throwaway_steps(loop.runner, loop.pool, 64)
    for group, blocks in enumerate(loop.pool.granted):
        assert blocks == 0
        for layer in loop.pool.groups[group].layers:
            assert loop.pool.keys[layer][1 : loop.pool.null_block(group)].isnan().all()
    request = loop.request(prompt(9), 6)
    loop.run()
    assert_as_transformers(tinies, "gemma3", loop, request)


def test_closing_twice_is_closing_once(tinies: Tinies) -> None:
    loop = Loop(tinies.path("llama"))
    loop.runner.close()
    loop.runner.close()
    assert not loop.pool.keys
