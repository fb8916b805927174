"""One request as its consumer sees it.

Lives on the event loop; only disposal may happen on any thread.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator
from types import TracebackType
from typing import Any

from asyncllm.events import (
    Choice,
    Chunk,
    Completion,
    Delta,
    Done,
    FinishReason,
    Logprob,
    Timings,
    Usage,
)


async def shielded(future: asyncio.Future[Any]) -> None:
    """Wait until the future is done, whatever cancels the waiting task meanwhile.

    The cancellation is raised at the end instead. For clean-up that is known to be short.
    """
    import anyio

    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # else an anyio scope would cancel again every turn
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as exc:
                cancelled = exc
    if cancelled is not None:
        raise cancelled


class _Output:
    """What arrived of one of the `n` outputs: all of it, and what nobody has taken yet."""

    def __init__(self, index: int, wants_logprobs: bool) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None
        self._wants_logprobs = wants_logprobs
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] = []
        self._taken_texts = 0
        self._taken_tokens = 0
        self._taken_finish = False

    def receive(self, delta: Delta) -> None:
        if delta.text:
            self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop = delta.finish_reason, delta.stop

    @property
    def has_news(self) -> bool:
        return (
            self._taken_texts < len(self._texts)
            or self._taken_tokens < len(self._token_ids)
            or (self.finish_reason is not None and not self._taken_finish)
        )

    def take(self) -> Chunk:
        text = "".join(self._texts[self._taken_texts :])
        token_ids = tuple(self._token_ids[self._taken_tokens :])
        logprobs = tuple(self._logprobs[self._taken_tokens :]) if self._wants_logprobs else None
        self._taken_texts, self._taken_tokens = len(self._texts), len(self._token_ids)
        self._taken_finish = self.finish_reason is not None
        return Chunk(text, token_ids, logprobs, self.index, self.finish_reason)

    @property
    def token_count(self) -> int:
        return len(self._token_ids)

    def choice(self) -> Choice:
        return Choice(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason or "cancelled",
            stop=self.stop,
            logprobs=tuple(self._logprobs) if self._wants_logprobs else None,
        )


class Generation:
    """A request that runs: await it, iterate over it, or use it as a context manager.

    - `await generation` gives the `Completion`, again and again the same.
    - `async for chunk in generation` gives a `Chunk` whenever tokens have arrived.
    - `async with generation:` cancels what has not finished when the block is left.
    - `await generation.cancel()` ends it.

    Cancelling a task that awaits or iterates cancels the request; so does leaving the loop early,
    and dropping the generation unread. Made by `AsyncEngine.generate` and `AsyncEngine.chat`.

    Attributes:
        request_id: the request's name.
    """

    def __init__(
        self,
        key: int,
        request_id: str,
        *,
        n: int,
        wants_logprobs: bool,
        created_at: float,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[], None],
        prompt_tokens: Callable[[], int],
        engine: object,
    ) -> None:
        self.request_id = request_id
        self._key = key  # what events are matched by: names may be used again
        self._loop = loop
        self._cancel = cancel  # only enqueues; may be called from any thread
        self._prompt_tokens = prompt_tokens
        self._engine = engine  # an engine lives as long as one of its generations is held
        self._created_at = created_at
        self._outputs = [_Output(index, wants_logprobs) for index in range(n)]
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._done = False
        self._ended: asyncio.Future[None] = loop.create_future()
        self._waiters: set[asyncio.Future[None]] = set()
        self._iterator: weakref.ref[ChunkIterator] | None = None

    def __repr__(self) -> str:
        state = "open" if not self._done else "failed" if self._error else "done"
        return f"<Generation {self.request_id} {state}>"

    @property
    def completion(self) -> Completion | None:
        """The `Completion` once the request has ended, else `None`.

        After a timeout, a close or another error it holds the partial output.
        """
        return self._completion

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._done

    async def result(self) -> Completion:
        """Wait for the end. The same as awaiting the generation, for `asyncio.create_task`.

        Raises:
            PromptTooLongError, RequestError: the request is at fault.
            TimeoutError: `timeout` ran out; the partial output is in `completion`.
            EngineClosedError: the engine was closed; likewise.
            EngineDeadError: the engine failed.
        """
        if not self._done:
            self._check_loop()
        try:
            while not self._done:
                await self._news()
        except BaseException:  # the waiting task was cancelled or dropped
            self._give_up()
            raise
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._completion is not None
        return self._completion

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.result().__await__()

    def __aiter__(self) -> ChunkIterator:
        if self._iterator is not None:
            live = self._iterator()
            if live is not None and not live.ended:
                raise RuntimeError(
                    f"request {self.request_id} is being iterated already; "
                    "its chunks go to one iterator at a time"
                )
        iterator = ChunkIterator(self)
        self._iterator = weakref.ref(iterator)
        return iterator

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cancel()

    async def cancel(self) -> None:
        """End the request and wait until its K/V blocks are free, at most one step. Idempotent.

        Shielded: a cancellation that arrives meanwhile is raised once that is done.
        """
        if self._done:
            return
        self._check_loop()
        self._cancel()
        await shielded(self._ended)

    def __del__(self) -> None:
        if hasattr(self, "_waiters"):  # else __init__ failed
            self._give_up()

    def _give_up(self) -> None:
        if not self._done:
            self._cancel()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"request {self.request_id} belongs to another event loop; "
                "use it on the loop its engine was loaded on"
            )

    async def _news(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Called by the delivery callback, on the loop.

    def _receive(self, delta: Delta) -> None:
        if not self._done:
            self._outputs[delta.index].receive(delta)
            self._wake()

    def _finish(self, done: Done) -> None:
        if self._done:
            return
        now = time.perf_counter()
        for output in self._outputs:
            if output.finish_reason is None:
                output.finish_reason = "cancelled"
        choices = tuple(output.choice() for output in self._outputs)
        first, total = done.first_token_s, now - self._created_at
        queued = min(done.queued_s, total)
        self._completion = Completion(
            request_id=self.request_id,
            text=choices[0].text,
            token_ids=choices[0].token_ids,
            finish_reason=choices[0].finish_reason,
            stop=choices[0].stop,
            logprobs=choices[0].logprobs,
            prompt_logprobs=done.prompt_logprobs,
            usage=Usage(
                self._prompt_tokens(),
                sum(output.token_count for output in self._outputs),
                done.cached_tokens,
            ),
            timings=Timings(queued, (total if first is None else first) - queued, first, total),
            choices=choices,
        )
        self._error = done.error
        self._done = True
        self._ended.set_result(None)
        self._wake()

    def _take(self) -> Chunk | None:
        for output in self._outputs:
            if output.has_news:
                return output.take()
        return None


class ChunkIterator(AsyncIterator[Chunk]):
    """Gives a generation's chunks; closing or dropping it before the end cancels the request."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.ended = False

    def __aiter__(self) -> ChunkIterator:
        return self

    async def __anext__(self) -> Chunk:
        if self.ended:
            raise StopAsyncIteration
        generation = self._generation
        generation._check_loop()
        try:
            while True:
                chunk = generation._take()
                if chunk is not None and not self._only_says_failed(chunk):
                    return chunk
                if generation._done:
                    break
                await generation._news()
        except BaseException:
            generation._give_up()
            raise
        self.ended = True
        if generation._error is not None:
            raise generation._error.with_traceback(None)
        raise StopAsyncIteration

    def _only_says_failed(self, chunk: Chunk) -> bool:
        # An error is raised, not told by an empty last chunk.
        return self._generation._error is not None and not chunk.token_ids and not chunk.text

    async def aclose(self) -> None:
        """Stop iterating; cancels the request unless the end was reached."""
        if not self.ended:
            self.ended = True
            await self._generation.cancel()

    def __del__(self) -> None:
        if not getattr(self, "ended", True):
            self._generation._give_up()
