"""Many streams at once: one pass over the weights serves all that run.

Usage: python examples/many_streams.py MODEL.gguf [STREAMS]
"""

import asyncio
import sys
import time

from asyncllm import AsyncEngine

SUBJECTS = ["the sea", "a clock", "rust", "tea", "a lost key", "snow", "a train", "the moon"]


async def tell(engine: AsyncEngine, subject: str) -> int:
    tokens = 0
    async for chunk in engine.generate(f"A short note about {subject}:", max_tokens=24):
        tokens += len(chunk.token_ids)
    print(f"{subject}: {tokens} tokens")
    return tokens


async def main(model: str, streams: int) -> None:
    async with AsyncEngine.load(model, max_seqs=8) as engine:
        started = time.perf_counter()
        subjects = [SUBJECTS[i % len(SUBJECTS)] for i in range(streams)]
        counts = await asyncio.gather(*(tell(engine, subject) for subject in subjects))
        seconds = time.perf_counter() - started
        print(f"{sum(counts)} tokens in {seconds:.1f} s over {streams} streams")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8))
