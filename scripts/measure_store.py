"""Measure what a block store gives after a restart, and what it costs where it gives nothing.

Usage: python scripts/measure_store.py MODEL [--lengths 200,800,1500] [--rounds 5] [--threads N]
           [--device auto] [--file PATH] [--kv-dtype auto]

Time to the first token of a prompt: cold in a new engine, against a new engine over the store that
the cold one left behind. Decoding: two engines in turn, with a store and without, prompts that no
cache knows. All in turns (A B A B), medians, ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncllm import AsyncEngine
from asyncllm.bench.machine import described

DECODED = 128
WAVES = 2  # of requests in a turn: what one leaves behind is written while the next runs


async def first_token(engine: AsyncEngine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were cached."""
    done = await engine.generate(prompt, max_tokens=1, temperature=0)
    return done.timings.first_token_s or 0.0, done.usage.cached_tokens


async def restarts(model: Path, lengths: list[int], rounds: int, options: dict[str, Any]) -> None:
    rng = random.Random()
    for length in lengths:
        cold: list[float] = []
        warm: list[float] = []
        cached = 0
        for _ in range(rounds):
            prompt = rng.choices(range(1000, 30_000), k=length)
            for seconds in (cold, warm):
                async with AsyncEngine.load(model, **options) as engine:
                    # What only the first request of a process pays is not the store's doing.
                    await first_token(engine, rng.choices(range(1000, 30_000), k=8))
                    found, cached = await first_token(engine, prompt)
                    seconds.append(found)
        ratio = statistics.median(c / w for c, w in zip(cold, warm, strict=True))
        print(
            f"{length:6} tokens: cold {1000 * statistics.median(cold):8.1f} ms, after a restart "
            f"{1000 * statistics.median(warm):7.1f} ms ({cached} cached), ratio {ratio:.1f}"
        )


async def decoding(model: Path, rounds: int, sequences: int, options: dict[str, Any]) -> None:
    rng = random.Random()
    plain = {key: value for key, value in options.items() if not key.startswith("kv_store")}
    rates: tuple[list[float], list[float]] = ([], [])
    async with (
        AsyncEngine.load(model, **plain) as without,
        AsyncEngine.load(model, **options) as with_store,
    ):
        for turn in range(rounds + 1):
            both = list(zip((without, with_store), rates, strict=True))
            for engine, found in both if turn % 2 else reversed(both):
                started = time.perf_counter()
                for _ in range(WAVES):
                    generations = [
                        engine.generate(
                            rng.choices(range(1000, 30_000), k=40),
                            max_tokens=DECODED,
                            ignore_eos=True,
                        )
                        for _ in range(sequences)
                    ]
                    await asyncio.gather(*(generation.result() for generation in generations))
                if turn:  # the first is for warming up
                    found.append(WAVES * DECODED / (time.perf_counter() - started))
                await asyncio.sleep(0.5)  # for what is still being written
        stats = with_store.stats()
    ratio = statistics.median(b / a for a, b in zip(*rates, strict=True))
    print(
        f"decoding {sequences} sequences: {statistics.median(rates[0]):.1f} tokens/s each without, "
        f"{statistics.median(rates[1]):.1f} with a store, ratio {ratio:.3f}; "
        f"{stats.store_written_blocks} blocks written, {stats.store_dropped_blocks} dropped, "
        f"{stats.store_hit_blocks} hits"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", default="200,800,1500")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", default="1,4")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--file-bytes", type=int, default=4 << 30)
    arguments = parser.parse_args()
    print(described("cpu" if arguments.device == "auto" else arguments.device))
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {
            "threads": arguments.threads,
            "device": arguments.device,
            "kv_dtype": arguments.kv_dtype,
            "kv_store": arguments.file or Path(directory) / "blocks",
            "kv_store_bytes": arguments.file_bytes,
        }
        lengths = [int(part) for part in arguments.lengths.split(",") if part]
        await restarts(arguments.model, lengths, arguments.rounds, options)
        for sequences in filter(None, arguments.sequences.split(",")):
            await decoding(arguments.model, arguments.rounds, int(sequences), options)


if __name__ == "__main__":
    asyncio.run(main())
