"""A streaming endpoint: the engine lives as long as the application, and a client that goes away
takes its request with it.

Usage: MODEL=model.gguf uvicorn examples.fastapi_app:app
       curl -N 'http://127.0.0.1:8000/generate?prompt=Once+upon+a+time'
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import StreamingResponse

from asyncllm import AsyncEngine


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncEngine.load(os.environ["MODEL"]) as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/generate")
async def generate(
    request: Request,
    # What can be refused is refused here: once the response has begun, its status is sent.
    prompt: Annotated[str, Query(min_length=1)],
    max_tokens: Annotated[int, Query(ge=1)] = 256,
) -> StreamingResponse:
    engine: AsyncEngine = request.app.state.engine
    generation = engine.generate(prompt, max_tokens=max_tokens)

    async def body() -> AsyncIterator[str]:
        # The server cancels this when the client disconnects; the block cancels the request.
        async with generation:
            async for chunk in generation:
                yield chunk.text

    return StreamingResponse(body(), media_type="text/plain")


@app.get("/stats")
async def stats(request: Request) -> dict[str, int]:
    counters = request.app.state.engine.stats()
    return {"running": counters.running, "kv_blocks_used": counters.kv_blocks_used}
