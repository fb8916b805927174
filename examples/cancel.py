"""Three ways to stop a generation; each gives its K/V blocks back within a step.

Usage: python examples/cancel.py MODEL.gguf
"""

import asyncio
import sys

from asyncllm import AsyncEngine


async def main(model: str) -> None:
    async with AsyncEngine.load(model) as engine:
        # 1. Leave the block: whatever has not finished is cancelled.
        async with engine.generate("Count to a thousand:", max_tokens=1000) as generation:
            tokens = 0
            async for chunk in generation:
                print(chunk.text, end="", flush=True)
                tokens += len(chunk.token_ids)
                if tokens >= 5:
                    break
        print("\nleft the block:", (await generation).finish_reason)

        # 2. Cancel the task that waits for it.
        task = asyncio.create_task(engine.generate("Once upon", max_tokens=1000).result())
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        print("cancelled the task:", task.cancelled())

        # 3. Ask for it, and know that the blocks are free when it returns.
        generation = engine.generate("Once upon", max_tokens=1000)
        await asyncio.sleep(0.2)
        await generation.cancel()
        print("blocks in use:", engine.stats().kv_blocks_used)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
