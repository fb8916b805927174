"""The kernels of decode steps on a GPU, by their time.

    python -m scripts.gpu_profile MODEL [--batch 1] [--depth 0] [--tokens 32]

MODEL is a GGUF file, such as `asyncllm bench --synthetic NAME --keep FILE` leaves.
"""

from __future__ import annotations

import argparse
import asyncio

import torch

from asyncllm import AsyncEngine
from asyncllm.bench.workload import Prompts, Workload


async def decode(engine: AsyncEngine, prompts: Prompts, tokens: int) -> None:
    # The prompts are in the cache the second time, so that decode steps are nearly all that runs.
    for length in (1, tokens):
        generations = [
            engine.generate(prompt, max_tokens=length, temperature=0, ignore_eos=True)
            for prompt in prompts
        ]
        await asyncio.gather(*(generation.result() for generation in generations))


async def run(options: argparse.Namespace) -> str:
    workload = Workload.decode(options.batch, options.depth, options.tokens)
    context = workload.prompt_tokens + workload.tokens + 1
    async with AsyncEngine.load(
        options.model, device="cuda", max_seqs=options.batch, context_length=context
    ) as engine:
        prompts = workload.prompts(range(engine.tokenizer.vocab_size), engine.tokenizer.eog_ids, 0)
        await decode(engine, prompts, workload.tokens)  # captures the graphs
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as found:
            await decode(engine, prompts, workload.tokens)
    table: str = found.key_averages().table(sort_by="cuda_time_total", row_limit=25)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--depth", type=int, default=0, help="tokens of each before")
    parser.add_argument("--tokens", type=int, default=32, help="of each")
    print(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
