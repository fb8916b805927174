"""A request ends when its consumer does, however that happens; nothing else is disturbed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest

from asyncllm import AsyncEngine, EngineClosedError
from asyncllm.events import Chunk
from asyncllm.generation import Generation
from tests.fake_engine import FakeModel, letters, until
from tests.fake_runner import continuation

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
STEP_S = 0.01


def endless(engine: AsyncEngine, **more: object) -> Generation:
    return engine.generate(PROMPT, max_tokens=500, ignore_eos=True, seed=0, **more)  # type: ignore[arg-type]


async def tokens_of(generation: Generation, count: int) -> None:
    seen = 0
    async for chunk in generation:
        seen += len(chunk.token_ids)
        if seen >= count:
            return


async def by_cancel(generation: Generation) -> None:
    await generation.cancel()


async def by_task(generation: Generation) -> None:
    task = asyncio.create_task(generation.result())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_break(generation: Generation) -> None:
    async for _ in generation:
        break


async def by_exception(generation: Generation) -> None:
    with pytest.raises(KeyError):
        async for _ in generation:
            raise KeyError


async def by_anyio_scope(generation: Generation) -> None:
    with anyio.move_on_after(STEP_S) as scope:
        await generation
    assert scope.cancelled_caught


async def by_block(generation: Generation) -> None:
    async with generation:
        pass


async def by_iterator_close(generation: Generation) -> None:
    iterator = aiter(generation)
    await anext(iterator)
    await iterator.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)


WAYS = [by_cancel, by_task, by_break, by_exception, by_anyio_scope, by_block, by_iterator_close]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ahead", [False, True])
async def test_every_way_of_leaving_frees_the_blocks(
    way: Callable[[Generation], Awaitable[None]], ahead: bool
) -> None:
    async with FakeModel(step_s=STEP_S, ahead=ahead).load() as engine:
        other = endless(engine)
        await tokens_of_first(other)
        generation = endless(engine)
        await way(generation)
        await until(lambda: engine.stats().cancelled == 1, 1.0)
        assert engine.stats().running == 1
        if way is not by_task and way is not by_anyio_scope:
            done = await generation
            assert done.finish_reason == "cancelled"
        await other.cancel()
        assert engine.stats().kv_blocks_used == 0
        done = await other
        assert list(done.token_ids) == continuation(PROMPT, len(done.token_ids), seed=0, end=None)


async def tokens_of_first(generation: Generation) -> Chunk:
    iterator = aiter(generation)
    chunk = await anext(iterator)
    iterator.ended = True  # let go of the iterator without cancelling
    return chunk


async def test_cancel_returns_only_once_the_blocks_are_free() -> None:
    async with FakeModel(step_s=STEP_S).load() as engine:
        generation = endless(engine)
        await tokens_of_first(generation)
        assert engine.stats().kv_blocks_used > 0
        await generation.cancel()
        assert engine.stats().kv_blocks_used == 0
        await generation.cancel()  # idempotent


async def test_a_request_cancelled_while_waiting_never_reaches_the_model() -> None:
    model = FakeModel(step_s=STEP_S, max_seqs=1, prefix_cache=False)
    async with model.load() as engine:
        first = endless(engine)
        await tokens_of_first(first)
        computed = model.runner.prompt_tokens_computed
        waiting = engine.generate([7] * 40, max_tokens=5)
        await until(lambda: engine.stats().waiting == 1)
        await waiting.cancel()
        assert (await waiting).finish_reason == "cancelled"
        assert (await waiting).token_ids == ()
        await first.cancel()
        assert (await engine.generate([7], max_tokens=1)).usage.completion_tokens == 1
        assert model.runner.prompt_tokens_computed == computed + 1


async def test_cancelling_a_request_of_four_outputs_frees_all_four() -> None:
    async with FakeModel(step_s=STEP_S).load() as engine:
        generation = endless(engine, n=4)
        await until(lambda: engine.stats().decoding == 4)
        await generation.cancel()
        assert engine.stats().kv_blocks_used == 0
        assert [c.finish_reason for c in (await generation).choices] == ["cancelled"] * 4


async def test_a_task_cancelled_while_its_consumer_sleeps_leaves_the_running_set() -> None:
    async with FakeModel(step_s=STEP_S).load() as engine:
        seen = asyncio.Event()

        async def consume() -> None:
            async for _ in endless(engine):
                seen.set()
                await asyncio.sleep(10)

        task = asyncio.create_task(consume())
        await seen.wait()
        task.cancel()
        await asyncio.wait([task])
        del task
        gc.collect()
        await until(lambda: engine.stats().running == 0, 1.0)
        assert engine.stats().kv_blocks_used == 0


async def test_a_cancel_during_the_only_step_is_reported_as_cancelled() -> None:
    async with FakeModel(step_s=0.1).load() as engine:
        generation = engine.generate([5] * 12, max_tokens=1)
        await asyncio.sleep(0.05)
        await generation.cancel()
        assert (await generation).finish_reason == "cancelled"
        assert engine.stats().kv_blocks_used == 0
        again = await engine.generate([5] * 12, max_tokens=1, seed=0)
        assert list(again.token_ids) == continuation([5] * 12, 1)


async def test_a_generation_dropped_unread_is_cancelled() -> None:
    async with FakeModel(step_s=STEP_S).load() as engine:
        endless(engine)
        gc.collect()
        await until(lambda: engine.stats().received == 1)
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().kv_blocks_used == 0
        # One that had begun, dropped on another thread.
        held = [endless(engine)]
        await tokens_of_first(held[0])
        thread = threading.Thread(target=held.clear)
        thread.start()
        await until(lambda: not thread.is_alive())
        await until(lambda: engine.stats().running == 0)


async def test_a_timeout_raises_and_leaves_the_partial_output() -> None:
    async with FakeModel(step_s=STEP_S).load() as engine:
        generation = endless(engine, timeout=0.15)
        with pytest.raises(TimeoutError):
            await generation
        assert generation.completion is not None
        assert 0 < len(generation.completion.token_ids) < 30
        assert generation.completion.finish_reason == "cancelled"
        assert engine.stats().kv_blocks_used == 0
        with pytest.raises(TimeoutError):  # again and again the same
            await generation
        iterated = endless(engine, timeout=0.1)
        text = ""
        with pytest.raises(TimeoutError):
            async for chunk in iterated:
                text += chunk.text
        assert iterated.completion is not None
        assert text == iterated.completion.text != ""


async def test_a_timeout_holds_while_the_loop_is_blocked_and_while_waiting() -> None:
    async with FakeModel(step_s=STEP_S, max_seqs=1).load() as engine:
        running, waiting = endless(engine, timeout=0.1), endless(engine, timeout=0.05)
        await asyncio.sleep(0)
        threading.Event().wait(0.3)  # the loop is blocked; no timer of its own could fire
        assert engine.stats().kv_blocks_used == 0
        for generation in (running, waiting):
            with pytest.raises(TimeoutError):
                await generation


async def test_cancelling_one_of_two_awaiters_cancels_the_request() -> None:
    async with FakeModel(step_s=STEP_S).load() as engine:
        generation = endless(engine)
        first = asyncio.create_task(generation.result())
        second = asyncio.create_task(generation.result())
        await asyncio.sleep(0.03)
        first.cancel()
        assert (await second).finish_reason == "cancelled"
        assert first.cancelled()


async def test_a_shielded_awaiter_may_be_cancelled_without_harm() -> None:
    async with FakeModel(step_s=STEP_S).load() as engine:
        inner = asyncio.create_task(engine.generate(PROMPT, max_tokens=5, ignore_eos=True).result())

        async def wait() -> None:
            await asyncio.shield(inner)

        outer = asyncio.create_task(wait())
        await asyncio.sleep(0.02)
        outer.cancel()
        assert (await inner).finish_reason == "length"


async def test_cancel_is_shielded_from_the_cancellation_of_its_own_task() -> None:
    async with FakeModel(step_s=0.1).load() as engine:
        generation = endless(engine)
        await tokens_of_first(generation)
        task = asyncio.create_task(generation.cancel())
        await asyncio.sleep(0)  # it waits now; the step in flight may end at any moment
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().kv_blocks_used == 0
        assert (await generation).finish_reason == "cancelled"


async def test_a_second_live_iterator_is_refused() -> None:
    async with FakeModel(step_s=STEP_S).load() as engine:
        generation = engine.generate(PROMPT, max_tokens=3)
        iterator = aiter(generation)
        with pytest.raises(RuntimeError, match="iterated already"):
            aiter(generation)
        ids = [token async for chunk in iterator for token in chunk.token_ids]
        assert ids == list((await generation).token_ids)
        assert [chunk async for chunk in generation] == []  # the first is exhausted


async def test_a_slow_reader_slows_nobody_and_reads_everything_later() -> None:
    async with FakeModel(step_s=0.002).load() as engine:
        slow = engine.generate(PROMPT, max_tokens=60, ignore_eos=True, seed=0)
        fast = [engine.generate([i] * 5, max_tokens=60, ignore_eos=True) for i in (1, 2)]
        done = await asyncio.gather(*(generation.result() for generation in fast))
        assert [len(completion.token_ids) for completion in done] == [60, 60]
        chunks = [chunk async for chunk in slow]
        assert len(chunks) <= 3  # what was not taken was merged
        assert "".join(chunk.text for chunk in chunks) == (await slow).text
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert ids == continuation(PROMPT, 60, end=None)
        assert letters(ids) == (await slow).text


async def test_closing_ends_open_requests_with_their_partial_output() -> None:
    async with FakeModel(step_s=STEP_S, max_seqs=1).load() as engine:
        running, waiting = endless(engine), endless(engine)
        await tokens_of_first(running)
    for generation in (running, waiting):
        with pytest.raises(EngineClosedError):
            await generation
        assert generation.completion is not None
    assert running.completion is not None and running.completion.text
    with pytest.raises(EngineClosedError):
        engine.generate(PROMPT)


async def test_draining_lets_open_requests_finish() -> None:
    engine = await FakeModel(step_s=STEP_S, max_seqs=1).load()
    generations = [engine.generate([i] * 3, max_tokens=4, ignore_eos=True) for i in (1, 2)]
    await engine.aclose(drain=True)
    assert [len((await g).token_ids) for g in generations] == [4, 4]
