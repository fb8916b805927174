"""Loading, closing, and what an engine does with its requests; over a fake model."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
import weakref

import pytest

from asyncllm import (
    AsyncEngine,
    EngineClosedError,
    EngineDeadError,
    LoadProgress,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    SamplingParams,
)
from tests.fake_engine import FakeModel, FakeTokenizer, letters, until
from tests.fake_runner import END, continuation

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def engine_threads() -> int:
    return sum(thread.name == "asyncllm-engine" for thread in threading.enumerate())


async def test_a_request_gives_its_completion() -> None:
    async with FakeModel().load() as engine:
        done = await engine.generate(PROMPT, max_tokens=6, seed=1, request_id="mine")
        assert list(done.token_ids) == continuation(PROMPT, 6, seed=1)
        assert done.text == letters(done.token_ids)
        assert done.request_id == "mine"
        assert done.usage.prompt_tokens == len(PROMPT)
        assert done.usage.completion_tokens == len(done.token_ids)
        timings = done.timings
        assert timings.first_token_s is not None
        assert 0 <= timings.queued_s <= timings.first_token_s <= timings.total_s
        assert timings.prefill_s == pytest.approx(timings.first_token_s - timings.queued_s)
        assert done.choices[0].token_ids == done.token_ids


async def test_chunks_join_to_the_completion() -> None:
    async with FakeModel(step_s=0.002).load() as engine:
        generation = engine.generate(PROMPT, max_tokens=20, ignore_eos=True, n=2, seed=3)
        texts, ids = ["", ""], [[], []]  # type: tuple[list[str], list[list[int]]]
        last: list[str | None] = [None, None]
        async for chunk in generation:
            assert last[chunk.index] is None, "a chunk after the last"
            texts[chunk.index] += chunk.text
            ids[chunk.index] += chunk.token_ids
            last[chunk.index] = chunk.finish_reason
        done = generation.completion
        assert done is not None
        assert texts == [choice.text for choice in done.choices]
        assert ids == [list(choice.token_ids) for choice in done.choices]
        assert ids[1] == continuation(PROMPT, 20, seed=3, index=1, end=None)
        assert last == ["length", "length"]


async def test_an_end_token_counts_but_has_no_text() -> None:
    prompt = next([i, i] for i in range(1, 50) if END in continuation([i, i], 30, seed=0))
    async with FakeModel().load() as engine:
        done = await engine.generate(prompt, max_tokens=30, seed=0)
        assert done.finish_reason == "stop"
        assert done.stop == END
        assert done.token_ids[-1] == END
        assert done.text == letters(done.token_ids)


async def test_a_stop_string_ends_a_request() -> None:
    expected = continuation(PROMPT, 10, seed=0, end=None)
    stop = letters(expected[4:5])
    async with FakeModel().load() as engine:
        done = await engine.generate(PROMPT, max_tokens=10, seed=0, ignore_eos=True, stop=stop)
    first = letters(expected).index(stop)
    assert done.finish_reason == "stop"
    assert done.stop == stop
    assert done.text == letters(expected)[:first]


async def test_loading_can_be_awaited_or_entered_and_reports_progress() -> None:
    reports: list[LoadProgress] = []
    engine = await FakeModel().load(reports.append)
    await asyncio.sleep(0)
    assert [report.fraction for report in reports] == [0.5, 1.0]
    async with engine:
        await engine.generate(PROMPT, max_tokens=1)
    await engine.aclose()
    assert engine_threads() == 0


async def test_what_on_progress_raises_does_not_stop_the_load() -> None:
    def broken(report: LoadProgress) -> None:
        raise KeyError(report.stage)

    async with FakeModel().load(broken) as engine:
        assert (await engine.generate(PROMPT, max_tokens=1)).token_ids


async def test_a_load_that_fails_raises_and_leaves_no_thread() -> None:
    with pytest.raises(OSError, match="no such"):
        await FakeModel(build_error=OSError("no such")).load()
    assert engine_threads() == 0


async def test_a_cancelled_load_is_joined() -> None:
    model = FakeModel(build_s=5.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await model.load()
    assert engine_threads() == 0
    assert model.runner.closed


async def test_a_dropped_engine_warns_and_stops() -> None:
    model = FakeModel()
    engine = await model.load()
    await engine.generate(PROMPT, max_tokens=1)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del engine
        gc.collect()
    await until(lambda: engine_threads() == 0)
    assert model.runner.closed


async def test_a_closed_engine_holds_nothing_of_the_model() -> None:
    model = FakeModel()
    engine = await model.load()
    await engine.generate(PROMPT, max_tokens=1)
    runner = weakref.ref(model.runner)
    await engine.aclose()
    del model
    gc.collect()
    assert runner() is None
    assert engine.stats().kv_blocks_total == 0


async def test_closing_is_idempotent_and_may_happen_twice_at_once() -> None:
    engine = await FakeModel(step_s=0.01).load()
    generation = engine.generate(PROMPT, max_tokens=200, ignore_eos=True)
    await asyncio.sleep(0.02)
    await asyncio.gather(engine.aclose(), engine.aclose())
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await generation


async def test_closing_does_not_wait_for_a_long_step() -> None:
    engine = await FakeModel(step_s=20.0).load()
    generation = engine.generate(PROMPT, max_tokens=1)
    await asyncio.sleep(0.05)
    started = time.perf_counter()
    await engine.aclose()
    assert time.perf_counter() - started < 1.0
    with pytest.raises(EngineClosedError):
        await generation


async def test_a_close_may_come_from_another_loop() -> None:
    engine = await FakeModel().load()
    await asyncio.to_thread(asyncio.run, engine.aclose())
    assert engine_threads() == 0


async def test_a_second_loop_gets_a_clear_error() -> None:
    async with FakeModel(step_s=0.01).load() as engine:
        generation = engine.generate(PROMPT, max_tokens=50, ignore_eos=True)

        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                engine.generate(PROMPT)
            with pytest.raises(RuntimeError, match="another event loop"):
                await generation

        await asyncio.to_thread(asyncio.run, elsewhere())
        with pytest.raises(RuntimeError, match="needs a running event loop"):
            await asyncio.to_thread(engine.generate, PROMPT)


async def test_a_dead_device_fails_every_open_request_at_once() -> None:
    model = FakeModel(step_s=0.01, max_seqs=1)
    async with model.load() as engine:
        generations = [engine.generate(PROMPT, max_tokens=50, ignore_eos=True) for _ in range(3)]
        await until(lambda: engine.stats().decoding == 1)
        model.runner.fault = OSError("the device fell off the bus")
        for generation in generations:
            with pytest.raises(EngineDeadError, match="fell off") as caught:
                await generation
            assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(EngineDeadError):
            engine.generate(PROMPT)
        assert generations[0].completion is not None


async def test_one_requests_fault_reaches_no_other() -> None:
    model = FakeModel(step_s=0.005)
    async with model.load() as engine:
        good = engine.generate(PROMPT, max_tokens=30, ignore_eos=True, seed=0)
        await until(lambda: engine.stats().decoding == 1)
        bad = engine.generate([2] * 4, max_tokens=30, ignore_eos=True)
        await until(lambda: engine.stats().decoding == 2)
        newest = max(model.runner._histories)
        model.runner.broken[newest] = RequestError("its logits are not numbers")
        with pytest.raises(RequestError, match="not numbers"):
            await bad
        assert bad.completion is not None and bad.completion.token_ids
        assert list((await good).token_ids) == continuation(PROMPT, 30, seed=0, end=None)
        assert engine.stats().failed == 1


async def test_an_impossible_prompt_is_refused_with_the_numbers_and_the_next_one_runs() -> None:
    async with FakeModel(blocks=8, block_tokens=16).load() as engine:
        with pytest.raises(PromptTooLongError, match=r"200.*13 blocks.*8"):
            await engine.generate([1] * 200)
        assert (await engine.generate([1] * 20, max_tokens=2)).usage.completion_tokens <= 2
        done = await engine.generate([1] * 100, ignore_eos=True, max_tokens=1000)
        assert done.finish_reason == "length"
        assert len(done.token_ids) >= 28
    async with FakeModel(context_length=50).load() as engine:
        with pytest.raises(PromptTooLongError, match=r"60.*50"):
            await engine.generate([1] * 60)


async def test_a_full_queue_refuses_and_recovers() -> None:
    async with FakeModel(step_s=0.01, max_seqs=1, max_waiting=2).load() as engine:
        held = [engine.generate(PROMPT, max_tokens=3, ignore_eos=True) for _ in range(3)]
        with pytest.raises(QueueFullError, match="max_waiting=2"):
            engine.generate(PROMPT)
        await until(lambda: engine.stats().running == 1)
        with pytest.raises(QueueFullError):
            engine.generate(PROMPT)
        await asyncio.gather(*(generation.result() for generation in held))
        assert (await engine.generate(PROMPT, max_tokens=1)).token_ids
    async with FakeModel(step_s=0.01, max_seqs=1, max_waiting=0).load() as engine:
        first = engine.generate(PROMPT, max_tokens=3)
        with pytest.raises(QueueFullError):
            engine.generate(PROMPT)
        await first


async def test_bad_arguments_raise_at_once_and_queue_nothing() -> None:
    async with FakeModel().load() as engine:
        for prompt in (["a"], [1.5], [-1], [1, FakeTokenizer.vocab_size], None, [[1]], [1 << 70]):
            with pytest.raises(RequestError, match="prompt"):
                engine.generate(prompt)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="n=9"):
            engine.generate([1], n=9)
        with pytest.raises(RequestError, match=r"logit_bias.*50"):
            engine.generate([1], logit_bias={50: 1.0})
        with pytest.raises(RequestError, match="stop_token_ids"):
            engine.generate([1], stop_token_ids=[-1])
        with pytest.raises(RequestError, match="tempreature"):
            engine.generate([1], tempreature=1.0)  # type: ignore[call-arg]
        with pytest.raises(RequestError, match="timeout"):
            engine.generate([1], timeout=-1)
        with pytest.raises(RequestError, match="priority"):
            engine.generate([1], priority="high")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="cache_salt"):
            engine.generate([1], cache_salt=1)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="not yet"):
            engine.generate([1], structured={"type": "object"})
        first = engine.generate([1], request_id="a", max_tokens=1)
        with pytest.raises(RequestError, match="'a'"):
            engine.generate([1], request_id="a")
        await first
        await engine.generate([1], request_id="a", max_tokens=1)
        with pytest.raises(RequestError, match="empty"):
            await engine.generate("")
        assert engine.stats().received == 3


async def test_priority_goes_first() -> None:
    async with FakeModel(step_s=0.005, max_seqs=1).load() as engine:
        order: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await engine.generate(PROMPT, max_tokens=3, priority=priority, ignore_eos=True)
            order.append(name)

        running = asyncio.create_task(ask("running", 0))
        await until(lambda: engine.stats().running == 1)
        rest = [asyncio.create_task(ask(n, p)) for n, p in (("low", 1), ("high", -1), ("mid", 0))]
        await asyncio.gather(running, *rest)
        assert order == ["running", "high", "mid", "low"]


async def test_a_long_prompt_is_encoded_off_the_loop() -> None:
    async with FakeModel(blocks=4096, chunk=512, context_length=9000).load() as engine:
        on: list[int] = []
        encode = engine.tokenizer.encode

        def watched(text: str, **more: object) -> list[int]:
            on.append(threading.get_ident())
            return encode(text, **more)  # type: ignore[arg-type]

        engine.tokenizer.encode = watched  # type: ignore[method-assign]
        await engine.generate("a" * 8000, max_tokens=1)
        await engine.generate("a", max_tokens=1)
        assert on[0] != threading.get_ident() == on[1]


async def test_a_blocked_loop_stops_no_step_and_finds_its_tokens_waiting() -> None:
    async with FakeModel(step_s=0.005).load() as engine:
        generation = engine.generate(PROMPT, max_tokens=1000, ignore_eos=True)
        await until(lambda: engine.stats().decoding == 1)
        before = engine.stats().steps
        time.sleep(0.5)
        done_while_blocked = engine.stats().steps - before
        before = engine.stats().steps
        await asyncio.sleep(0.5)
        done_while_free = engine.stats().steps - before
        await generation.cancel()
        assert done_while_blocked >= 0.8 * done_while_free > 20


async def test_no_callback_holds_the_loop() -> None:
    longest = 0.0

    async with FakeModel(step_s=0.001, max_seqs=32, blocks=4096).load() as engine:
        deliver = engine._delivery._deliver

        def timed(events: object) -> None:
            nonlocal longest
            # Of this thread only: others that run meanwhile are no work of the callback's.
            started = time.thread_time()
            deliver(events)  # type: ignore[arg-type]
            longest = max(longest, time.thread_time() - started)

        engine._delivery._deliver = timed  # type: ignore[method-assign]
        await asyncio.gather(
            *(
                engine.generate([i % 40 + 1], max_tokens=50, ignore_eos=True).result()
                for i in range(64)
            )
        )
    assert 0 < longest < 0.002


async def test_an_idle_engine_is_asleep() -> None:
    async with FakeModel().load():
        before = time.process_time()
        await asyncio.sleep(1.2)
        assert time.process_time() - before < 0.05


async def test_sampling_params_and_overrides_combine() -> None:
    async with FakeModel().load() as engine:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        done = await engine.generate(PROMPT, params, max_tokens=2)
        assert len(done.token_ids) == 2
        assert params.max_tokens == 9


async def test_log_probabilities_come_with_the_tokens() -> None:
    async with FakeModel().load() as engine:
        done = await engine.generate(PROMPT, max_tokens=4, logprobs=0, prompt_logprobs=1)
        assert done.logprobs is not None
        assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
        assert done.prompt_logprobs is not None and done.prompt_logprobs[0] is None
        told = [entry.token_id for entry in done.prompt_logprobs if entry is not None]
        assert told == PROMPT[1:]
        assert (await engine.generate(PROMPT, max_tokens=1)).logprobs is None


async def test_two_engines_live_side_by_side() -> None:
    async with FakeModel(step_s=0.001).load() as one, FakeModel(step_s=0.001).load() as two:
        done = await asyncio.gather(
            *(e.generate(PROMPT, max_tokens=20, seed=5).result() for e in (one, two, one, two))
        )
        assert len({completion.token_ids for completion in done}) == 1


async def test_cancelling_the_step_task_closes_the_engine() -> None:
    engine = await FakeModel(step_s=0.01).load()
    generation = engine.generate(PROMPT, max_tokens=500, ignore_eos=True)
    await asyncio.sleep(0.03)
    engine._step_task.cancel()
    with pytest.raises(EngineClosedError):
        await generation
    await until(lambda: engine_threads() == 0)
    with pytest.raises(EngineClosedError):
        engine.generate(PROMPT)
    await engine.aclose()


def test_a_loop_that_ends_without_closing_does_not_hang() -> None:
    kept: list[AsyncEngine] = []

    async def main() -> None:
        kept.append(await FakeModel(step_s=0.01).load())
        kept[0].generate(PROMPT, max_tokens=10_000, ignore_eos=True)
        await asyncio.sleep(0.03)

    asyncio.run(main())
    ended = time.perf_counter() + 2.0
    while engine_threads() and time.perf_counter() < ended:
        time.sleep(0.01)
    assert engine_threads() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        kept.clear()
        gc.collect()


def slow_chat(engine: AsyncEngine, seconds: float) -> None:
    """Make the tokenizer take its time, as a long conversation does."""
    quick = engine.tokenizer.encode_chat

    def slow(messages: list[dict[str, str]], **more: object) -> list[int]:
        time.sleep(seconds)
        return quick(messages, **more)  # type: ignore[arg-type]

    engine.tokenizer.encode_chat = slow  # type: ignore[method-assign, assignment]


HELLO = [{"role": "user", "content": "hi"}]


async def test_closing_ends_a_request_that_is_still_being_encoded() -> None:
    engine = await FakeModel().load()
    slow_chat(engine, 0.3)
    generation = engine.chat(HELLO, max_tokens=5)
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await asyncio.wait_for(generation.result(), 2)
    await generation.cancel()


async def test_timeouts_and_cancels_do_not_wait_for_encoding() -> None:
    async with FakeModel().load() as engine:
        slow_chat(engine, 0.4)
        started = time.perf_counter()
        first = engine.chat(HELLO, timeout=0.05)
        second = engine.chat(HELLO)
        with pytest.raises(TimeoutError):
            await first
        await second.cancel()
        assert time.perf_counter() - started < 0.3
        assert (await second).finish_reason == "cancelled"


async def test_an_automatic_name_may_be_a_users_name_too() -> None:
    async with FakeModel(step_s=0.002).load() as engine:
        mine = engine.generate(PROMPT, max_tokens=5, ignore_eos=True, request_id="request-1")
        other = engine.generate([9, 9], max_tokens=7, ignore_eos=True)
        assert len((await asyncio.wait_for(mine.result(), 2)).token_ids) == 5
        assert len((await asyncio.wait_for(other.result(), 2)).token_ids) == 7


async def test_the_name_of_a_dropped_request_may_be_used_at_once() -> None:
    async with FakeModel(step_s=0.01).load() as engine:
        old = engine.generate(PROMPT, max_tokens=500, ignore_eos=True, request_id="x")
        await until(lambda: engine.stats().decoding == 1)
        del old
        new = engine.generate(PROMPT, max_tokens=8, ignore_eos=True, request_id="x")
        assert len((await new).token_ids) == 8
        await until(lambda: engine.stats().running == 0)


async def test_finished_requests_are_forgotten_though_their_deadline_is_far() -> None:
    async with FakeModel().load() as engine:
        for _ in range(50):
            await engine.generate(PROMPT, max_tokens=1, timeout=3600.0)
        await engine.generate(PROMPT, max_tokens=1, timeout=float("inf"))
        gc.collect()
        kept = sum(type(item).__name__ == "Submission" for item in gc.get_objects())
        assert kept <= 2


async def test_awaiting_on_another_loop_does_not_cancel() -> None:
    async with FakeModel(step_s=0.01).load() as engine:
        generation = engine.generate(PROMPT, max_tokens=10, ignore_eos=True)

        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                await generation

        await asyncio.to_thread(asyncio.run, elsewhere())
        assert (await generation).finish_reason == "length"


async def test_draining_works_from_another_loop() -> None:
    engine = await FakeModel(step_s=0.01).load()
    generation = engine.generate(PROMPT, max_tokens=10, ignore_eos=True)
    await asyncio.to_thread(asyncio.run, engine.aclose(drain=True))
    assert len((await generation).token_ids) == 10


async def test_odd_messages_and_prompts_are_request_errors() -> None:
    async with FakeModel().load() as engine:
        for messages in (None, [5], "hi", {"role": "user"}):
            with pytest.raises(RequestError, match="messages"):
                engine.chat(messages)  # type: ignore[arg-type]
        for prompt in (b"12345", bytes(8), {1: 2}, {3}):
            with pytest.raises(RequestError, match="prompt"):
                engine.generate(prompt)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="presence_penalty"):
            engine.generate(PROMPT, presence_penalty=1e39)
        done = await engine.generate(PROMPT, max_tokens=1, timeout=10**400, cache_salt="\ud800")
        assert done.token_ids


async def test_a_prompt_encoded_before_its_announcement_is_read_runs_once() -> None:
    async with FakeModel(step_s=0.05).load() as engine:
        other = engine.generate(PROMPT, max_tokens=20, ignore_eos=True)
        await until(lambda: engine.stats().decoding == 1)
        # The thread is inside a step: announcement and encoded prompt wait in its queue together.
        chats = [engine.chat(HELLO, max_tokens=3, ignore_eos=True) for _ in range(5)]
        assert [len((await chat).token_ids) for chat in chats] == [3] * 5
        await other.cancel()
        assert engine.stats().kv_blocks_used == 0


async def test_host_time_leaves_out_what_the_device_takes() -> None:
    for ahead in (False, True):
        async with FakeModel(step_s=0.01, ahead=ahead).load() as engine:
            await engine.generate(PROMPT, max_tokens=20, ignore_eos=True)
            await asyncio.sleep(0.05)  # idle time is nobody's work either
            await engine.generate(PROMPT, max_tokens=1)
            stats = engine.stats()
            assert stats.steps >= 21
            assert 0 < stats.host_s / stats.steps < 0.01
