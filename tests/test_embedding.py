"""The engine inside somebody's process: what it needs, what it leaves alone, how it goes away."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import anyio
import pytest
from blockbuster import BlockingError

from asyncllm import AsyncEngine, Completion, RequestError
from tests.fake_engine import FakeModel
from tests.fake_runner import continuation

PROMPT = [3, 1, 4]
T = TypeVar("T")


def run(code: str, timeout: float = 20.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_importing_is_quick_and_loads_nothing_heavy() -> None:
    done = run("""
        import sys, time
        started = time.perf_counter()
        import asyncllm
        seconds = time.perf_counter() - started
        heavy = {"torch", "numpy", "structlog", "jinja2", "tokenizers", "sentencepiece", "gguf"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        print(seconds)
    """)
    assert done.returncode == 0, done.stderr
    times = [float(done.stdout)]
    while min(times) >= 0.3 and len(times) < 5:  # another process may have had the machine
        times.append(
            float(
                run(
                    "import time; t = time.perf_counter(); import asyncllm; "
                    "print(time.perf_counter() - t)"
                ).stdout
            )
        )
    assert min(times) < 0.3


ABANDON = """
    import asyncio, os, signal, sys, threading
    sys.path.insert(0, {root!r})
    from tests.fake_engine import FakeModel

    async def main():
        engine = await FakeModel(step_s={step_s}).load()
        generation = engine.generate([1, 2, 3], max_tokens=10_000, ignore_eos=True)
        async for chunk in generation:
            {leave}

    {run}
    print("left")
"""
LEAVE = {
    "the loop ends": ("return", "asyncio.run(main())", 0),
    "the loop is stopped and never closed": (
        "asyncio.get_running_loop().stop(); await asyncio.sleep(1)",
        """loop = asyncio.new_event_loop(); task = loop.create_task(main()); loop.run_forever()
    task._log_destroy_pending = False""",
        0,
    ),
    "sys.exit": ("sys.exit(3)", "asyncio.run(main())", 3),
    "interrupted": (
        "os.kill(os.getpid(), signal.SIGINT); await asyncio.sleep(1)",
        """
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(4)""",
        4,
    ),
}


@pytest.mark.parametrize("way", LEAVE)
@pytest.mark.parametrize("step_s", [0.001, 0.5])
def test_leaving_the_process_without_closing_is_clean_and_quick(way: str, step_s: float) -> None:
    leave, go, code = LEAVE[way]
    root = str(Path(__file__).parent.parent)
    source = ABANDON.format(root=root, step_s=step_s, leave=leave, run=go)
    lines = textwrap.dedent(source)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, timeout=20, check=False
    )
    seconds = time.perf_counter() - started
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert seconds < 4.0  # starting Python and importing included


async def work() -> None:
    async with FakeModel(step_s=0.001).load() as engine:
        done = await engine.generate(PROMPT, max_tokens=10, seed=0, ignore_eos=True)
        assert list(done.token_ids) == continuation(PROMPT, 10, end=None)
        async for _ in engine.generate(PROMPT, max_tokens=100, ignore_eos=True):
            break
        with anyio.move_on_after(0.05):
            await engine.generate(PROMPT, max_tokens=100_000 // 50, ignore_eos=True)


def test_it_works_under_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


def test_it_works_under_anyio() -> None:
    anyio.run(work, backend="asyncio")


def test_it_works_cell_by_cell_on_a_loop_that_keeps_running() -> None:
    loop = asyncio.new_event_loop()
    try:
        engine = loop.run_until_complete(_await(FakeModel().load()))
        for _ in range(2):
            done = loop.run_until_complete(_ask(engine))
            assert list(done.token_ids) == continuation(PROMPT, 2)
        loop.run_until_complete(engine.aclose())
    finally:
        loop.close()


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _ask(engine: AsyncEngine) -> Completion:
    return await engine.generate(PROMPT, max_tokens=2, seed=0)


async def test_it_is_closed_from_another_task_than_loaded_it() -> None:
    engine = await asyncio.create_task(_await(FakeModel().load()))
    await asyncio.create_task(_await(engine.generate(PROMPT, max_tokens=1)))
    await asyncio.create_task(engine.aclose())


async def test_five_loads_leave_no_thread_and_no_task() -> None:
    for _ in range(5):
        async with FakeModel().load() as engine:
            await engine.generate(PROMPT, max_tokens=2)
        names = [thread.name for thread in threading.enumerate()]
        assert "asyncllm-engine" not in names
        assert [t for t in asyncio.all_tasks() if t.get_name() == "asyncllm-step"] == []


async def test_signal_handlers_and_the_loop_policy_are_left_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with FakeModel().load() as engine:
        await engine.generate(PROMPT, max_tokens=2)
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert before == after


async def test_the_guard_against_blocking_calls_sees_one() -> None:
    async with FakeModel().load() as engine:

        def blocking(text: str, **more: object) -> list[int]:
            time.sleep(0.001)
            return [1]

        engine.tokenizer.encode = blocking  # type: ignore[method-assign]
        with pytest.raises(RequestError) as caught:
            await engine.generate("a", max_tokens=1)
        assert isinstance(caught.value.__cause__, BlockingError)
