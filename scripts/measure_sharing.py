"""How the engine's threads share cores: decoding while another process or engine computes.

Usage: python scripts/measure_sharing.py MODEL.gguf [THREADS]

Prints decode tokens per second alone, beside one busy process on the last core, and with two
engines at once, in turns (A B C A B C, medians). Beside a busy process the fair share is what is
left of the cores: all but half of one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time

from asyncllm import AsyncEngine
from asyncllm.runner.threads import physical_cores

ROUNDS = 5
TOKENS = 96
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


async def speed(engine: AsyncEngine) -> float:
    started = time.perf_counter()
    await engine.generate("Once", max_tokens=TOKENS, ignore_eos=True, prefix_cache=False)
    return TOKENS / (time.perf_counter() - started)


async def beside_a_process(engine: AsyncEngine) -> float:
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", BUSY, str(core)]
    ) as process:
        await asyncio.sleep(0.3)
        found = await speed(engine)
        process.kill()
    return found


async def main(model: str, threads: int) -> None:
    options = {"threads": threads, "context_length": 512}
    async with (
        AsyncEngine.load(model, **options) as engine,  # type: ignore[arg-type]
        AsyncEngine.load(model, **options) as other,  # type: ignore[arg-type]
    ):
        await speed(engine)
        await speed(other)
        alone, busy, both = [], [], []
        for _ in range(ROUNDS):
            alone.append(await speed(engine))
            busy.append(await beside_a_process(engine))
            both.append(sum(await asyncio.gather(speed(engine), speed(other))))
    free = statistics.median(alone)
    cores = physical_cores()
    share = min(1.0, (cores - 0.5) / threads)
    print(f"{threads} threads on {cores} cores; alone {free:.1f} tokens/s")
    ratio = statistics.median(busy) / free
    print(f"beside a busy process {ratio:.2f} of that, {ratio / share:.2f} of the fair share")
    print(f"two engines together {statistics.median(both) / free:.2f} of that")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else physical_cores()))
