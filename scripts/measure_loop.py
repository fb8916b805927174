"""How the engine and a busy event loop get on: steps per second and the loop's heartbeat.

Usage: python scripts/measure_loop.py MODEL.gguf [SECONDS] [THREADS]

Prints engine steps per second while the loop is free, blocked in a call that releases the
interpreter's lock, and busy in pure Python (A B C A B C, medians), and how late a 5 ms timer of the
loop fires while the engine computes.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from asyncllm import AsyncEngine

ROUNDS = 3


async def free(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def blocked(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251  the point of it


async def busy(seconds: float) -> None:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        count += 1


async def rate(
    engine: AsyncEngine, wait: Callable[[float], Awaitable[None]], seconds: float
) -> float:
    before, started = engine.stats().steps, time.perf_counter()
    await wait(seconds)
    return (engine.stats().steps - before) / (time.perf_counter() - started)


async def heartbeat(seconds: float) -> list[float]:
    late, end = [], time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        await asyncio.sleep(0.005)
        late.append((time.perf_counter() - started - 0.005) * 1e3)
    return sorted(late)


async def main(model: str, seconds: float, threads: int | None) -> None:
    async with AsyncEngine.load(model, context_length=2048, threads=threads) as engine:
        generation = engine.generate("Once upon a time", ignore_eos=True)
        chunks = aiter(generation)
        await anext(chunks)  # from here on it decodes
        rates: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for wait in (free, blocked, busy):
                rates.setdefault(wait.__name__, []).append(await rate(engine, wait, seconds))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        for name, value in medians.items():
            more = 1e3 / value - 1e3 / medians["free"]
            print(
                f"{name:8} {value:6.2f} steps/s, {value / medians['free']:.2f} of free, "
                f"{more:+.2f} ms a step"
            )
        late = await heartbeat(seconds)
        print(
            f"heartbeat: median {statistics.median(late):.2f} ms late, "
            f"99th percentile {late[int(len(late) * 0.99)]:.2f} ms, of {len(late)}"
        )
        await generation.cancel()


if __name__ == "__main__":
    SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    asyncio.run(main(sys.argv[1], SECONDS, int(sys.argv[3]) if len(sys.argv) > 3 else None))
