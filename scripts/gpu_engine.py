"""Decode and prefill rates on a GPU, end to end through `engine.generate()`.

Usage: python scripts/gpu_engine.py SHAPE [--batches 1,8,32] [--prompts 512,2048] [--profile]

Writes a synthetic checkpoint of the shape (a name in `asyncllm/synthetic.py`) to a temporary folder
unless SHAPE is a file, and prints the load stages, tokens per second, and with `--profile` the
kernels of a decode step by time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asyncllm import AsyncEngine, synthetic

ROUNDS = 3


def prompt(engine: AsyncEngine, length: int) -> list[int]:
    return [random.randrange(10, engine.tokenizer.vocab_size) for _ in range(length)]


async def decode(engine: AsyncEngine, batch: int, depth: int, tokens: int) -> float:
    """Tokens per second of a batch after its prompts, of all sequences together."""
    generations = [
        engine.generate(
            prompt(engine, depth), max_tokens=tokens, ignore_eos=True, prefix_cache=False
        )
        for _ in range(batch)
    ]
    done = await asyncio.gather(*(generation.result() for generation in generations))
    begun = max(each.timings.first_token_s or 0.0 for each in done)
    ended = min(each.timings.total_s for each in done)
    # From when the last has begun until the first has ended, all are decoding.
    slowest = max(done, key=lambda each: each.timings.first_token_s or 0.0)
    made = tokens - 1
    return batch * made * (ended - begun) / (slowest.timings.total_s - begun) / (ended - begun)


async def prefill(engine: AsyncEngine, length: int) -> float:
    started = time.perf_counter()
    await engine.generate(prompt(engine, length), max_tokens=1, prefix_cache=False)
    return length / (time.perf_counter() - started)


async def run(path: Path, batches: Sequence[int], lengths: Sequence[int], profile: bool) -> None:
    import torch

    started = time.perf_counter()
    context = max([*lengths, 1024]) + 512
    async with AsyncEngine.load(
        path, device="cuda", max_seqs=max(batches), context_length=context
    ) as engine:
        info = engine.info
        print(
            f"{info.name} on {info.backend_notes}, loaded in {time.perf_counter() - started:.1f} s"
        )
        print("  " + ", ".join(f"{s.name} {s.seconds:.2f}" for s in info.load_stages))
        print(
            f"  weights {info.weights_bytes / 1e9:.2f} GB, K/V {info.kv_ceiling_bytes / 1e9:.1f} GB"
        )
        for batch in batches:
            rates = [await decode(engine, batch, 64, 128) for _ in range(ROUNDS + 1)][1:]
            low, high = min(rates), max(rates)
            print(
                f"batch {batch:3}: {statistics.median(rates):9.1f} ({low:.1f}..{high:.1f}) tokens/s"
            )
        for length in lengths:
            rates = [await prefill(engine, length) for _ in range(ROUNDS + 5)][5:]
            low, high = min(rates), max(rates)
            median = statistics.median(rates)
            print(f"prompt {length:4}: {median:8.0f} ({low:.0f}..{high:.0f}) tokens/s")
        print(f"  {engine.stats()}")
        if profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                await decode(engine, 1, 64, 32)
            table = found.key_averages().table(sort_by="cuda_time_total", row_limit=25)
            print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.shape)
        if options.shape in synthetic.SHAPES:
            path = Path(folder) / "model.gguf"
            started = time.perf_counter()
            synthetic.write(options.shape, path)
            print(f"written in {time.perf_counter() - started:.1f} s", flush=True)
        batches = [int(each) for each in options.batches.split(",")]
        lengths = [int(each) for each in options.prompts.split(",")]
        asyncio.run(run(path, batches, lengths, options.profile))


if __name__ == "__main__":
    main()
