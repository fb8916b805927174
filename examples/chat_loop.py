"""A conversation in the terminal: the turns before are reused from the prefix cache.

Usage: python examples/chat_loop.py MODEL.gguf [MAX_TOKENS]
"""

import asyncio
import sys

from asyncllm import AsyncEngine


async def main(model: str, max_tokens: int) -> None:
    messages: list[dict[str, str]] = []
    async with AsyncEngine.load(model) as engine:
        while True:
            print("you: ", end="", flush=True)
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line.strip():
                return
            messages.append({"role": "user", "content": line.strip()})
            generation = engine.chat(messages, max_tokens=max_tokens)
            print("model: ", end="")
            async for chunk in generation:
                print(chunk.text, end="", flush=True)
            done = await generation
            print(f"\n({done.usage.cached_tokens} of {done.usage.prompt_tokens} tokens cached)")
            messages.append({"role": "assistant", "content": done.text})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 128))
