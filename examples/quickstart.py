"""Load a model, await a completion, then stream one.

Usage: python examples/quickstart.py MODEL.gguf
"""

import asyncio
import sys

from asyncllm import AsyncEngine


async def main(model: str) -> None:
    async with AsyncEngine.load(model) as engine:
        done = await engine.generate("The capital of France is", max_tokens=16, temperature=0)
        print(repr(done.text), done.finish_reason, done.usage)

        async for chunk in engine.generate("Once upon a time", max_tokens=48, temperature=0):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
