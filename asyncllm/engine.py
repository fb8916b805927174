"""`AsyncEngine`: the face of the engine, on the event loop."""

from __future__ import annotations

import array
import asyncio
import itertools
import random
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from asyncllm.delivery import Delivery
from asyncllm.engine_thread import EngineThread, Face, Loading, Parts, Submission
from asyncllm.errors import EngineClosedError, QueueFullError, RequestError
from asyncllm.generation import Generation, shielded
from asyncllm.info import EngineStats, LoadProgress, ModelInfo
from asyncllm.options import (
    EngineOptions,
    EngineOverrides,
    SamplingOverrides,
    SamplingParams,
    StrPath,
)
from asyncllm.scheduler.request import Request

if TYPE_CHECKING:
    from asyncllm.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prepare = Callable[[], Sequence[int]]

# Text up to this long is encoded at once (well under a millisecond); more goes to a thread.
INLINE_CHARACTERS = 2000
INLINE_BAD_WORDS = 16
FOREVER_S = 1e9  # a longer timeout is none


class EngineLoading:
    """What `AsyncEngine.load` returns: await it, or enter it with `async with`."""

    def __init__(
        self,
        build: Callable[[Loading], Parts],
        options: EngineOptions,
        on_progress: Callable[[LoadProgress], object] | None,
    ) -> None:
        self._build = build
        self._options = options
        self._on_progress = on_progress
        self._engine: AsyncEngine | None = None

    def __await__(self) -> Generator[Any, None, AsyncEngine]:
        return self._load().__await__()

    async def __aenter__(self) -> AsyncEngine:
        self._engine = await self._load()
        return self._engine

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._engine is not None:
            await self._engine.aclose()

    async def _load(self) -> AsyncEngine:
        delivery = Delivery(asyncio.get_running_loop(), self._on_progress)
        thread = EngineThread(self._build, delivery)
        thread.start()
        try:
            await asyncio.wait([delivery.loaded])
            face = delivery.loaded.result()
        except BaseException:
            thread.close()
            await shielded(delivery.ended)
            await _join(thread)
            raise
        return AsyncEngine(face, self._options, thread, delivery)


async def _join(thread: EngineThread) -> None:
    """Wait until the thread has ended; on any loop, and without an executor that may be busy."""

    async def ended() -> None:
        while thread.is_alive():  # noqa: ASYNC110  its last word is said; it only has to leave
            await asyncio.sleep(0.002)

    await shielded(asyncio.ensure_future(ended()))


async def _watch(thread: EngineThread, delivery: Delivery) -> None:
    """The step task: lives as long as the engine thread; cancelling it closes the engine.

    It holds no reference to the engine, so that a dropped engine can be noticed.
    """
    try:
        await asyncio.wait([delivery.ended])
    except asyncio.CancelledError:
        thread.close()
        await shielded(delivery.ended)
        raise


class AsyncEngine:
    """A language model inside this process, served to the event loop that loaded it.

    Made by `AsyncEngine.load`. Use it as an async context manager or call `aclose`.

    Attributes:
        info: what was loaded and how.
        tokenizer: the checkpoint's tokenizer; safe to use from any thread.
    """

    def __init__(
        self, face: Face, options: EngineOptions, thread: EngineThread, delivery: Delivery
    ) -> None:
        self.info: ModelInfo = face.info
        self.tokenizer: Tokenizer = face.tokenizer
        self._defaults = face.generation_defaults
        self._options = options
        self._thread = thread
        self._delivery = delivery
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._sent = 0
        self._names = itertools.count(1)
        self._random = random.Random()
        self._encoder: ThreadPoolExecutor | None = None
        self._step_task = self._loop.create_task(_watch(thread, delivery), name="asyncllm-step")

    @staticmethod
    def load(
        model: StrPath,
        options: EngineOptions | None = None,
        *,
        on_progress: Callable[[LoadProgress], object] | None = None,
        **overrides: Unpack[EngineOverrides],
    ) -> EngineLoading:
        """Load a model; await the result or enter it with `async with`.

        Args:
            model: a `.gguf` file, any part of a split set included.
            options: settings; the defaults suit most uses.
            on_progress: called on the event loop with a `LoadProgress` now and then; what it
                raises is logged.
            **overrides: fields of `EngineOptions`.

        Raises:
            OptionsError: at once, naming the field.
            ModelLoadError: from the await, naming file, tensor or field.
        """
        from asyncllm.loading import build

        chosen = (options or EngineOptions()).updated(overrides)
        return EngineLoading(lambda loading: build(model, chosen, loading), chosen, on_progress)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<AsyncEngine {self.info.name} on {self.info.device}, {state}>"

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        prefix_cache: bool = True,
        parse_special_tokens: bool = False,
        **overrides: Unpack[SamplingOverrides],
    ) -> Generation:
        """Queue a request and return at once.

        Args:
            prompt: text, or token ids (taken as they are).
            sampling: how tokens are chosen.
            request_id: a name of your own; must not be that of an open request.
            priority: lower runs first.
            timeout: seconds from now after which the request ends with `TimeoutError`.
            cache_salt: requests of different salts never share cached K/V blocks.
            prefix_cache: whether to reuse and leave cached blocks.
            parse_special_tokens: whether control tokens spelled in a `str` prompt count as such.
            **overrides: fields of `SamplingParams`.

        Raises:
            RequestError: an argument is not accepted; nothing was queued.
            QueueFullError: `max_waiting` requests wait already.
            EngineClosedError, EngineDeadError: the engine has ended.
            RuntimeError: called without a running event loop, or on another loop.
        """
        params = self._params(sampling, overrides)
        if isinstance(prompt, str):
            text = prompt

            def prepare() -> Sequence[int]:
                return self.tokenizer.encode(text, parse_special_tokens=parse_special_tokens)

            inline = len(text) <= INLINE_CHARACTERS
        else:
            ids = self._token_ids(prompt)

            def prepare() -> Sequence[int]:
                return ids

            inline = True
        return self._submit(
            prepare, params, inline, request_id, priority, timeout, cache_salt, prefix_cache
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        prefix_cache: bool = True,
        **overrides: Unpack[SamplingOverrides],
    ) -> Generation:
        """Queue a conversation, worded by the checkpoint's chat template, and return at once.

        Text of a message never becomes a control token.

        Args:
            messages: mappings with `role` and `content`, as the template expects them.
            sampling: as for `generate`, like the arguments not listed here.
            tools: descriptions of tools for the template.
            add_generation_prompt: whether the template opens the assistant's turn.
            template_args: more variables for the template.
            request_id: see `generate`.
            priority: see `generate`.
            timeout: see `generate`.
            cache_salt: see `generate`.
            prefix_cache: see `generate`.
            **overrides: fields of `SamplingParams`.

        Raises:
            RequestError: as for `generate`; a failing template raises it from the await.
        """
        params = self._params(sampling, overrides)
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise RequestError(f"messages={messages!r:.200}: accepted is a sequence of mappings")
        for at, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise RequestError(f"messages[{at}]={message!r:.200}: accepted is a mapping")
        conversation = [dict(message) for message in messages]

        def prepare() -> Sequence[int]:
            return self.tokenizer.encode_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                template_args=template_args,
            )

        # A template runs code of its own: how long it takes is not for the event loop to find out.
        return self._submit(
            prepare, params, False, request_id, priority, timeout, cache_salt, prefix_cache
        )

    def stats(self) -> EngineStats:
        """The newest snapshot of the counters; never waits."""
        return self._thread.stats

    async def aclose(self, *, drain: bool = False) -> None:
        """Close the engine and free everything. Idempotent; may be called from any task.

        Args:
            drain: let the open requests finish first; otherwise their consumers get
                `EngineClosedError`.
        """
        self._closed = True
        try:
            # Looking now and then works on any loop, and also for requests whose consumers left.
            while drain and self._has_open_requests():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        finally:
            self._thread.close()
            await _join(self._thread)
            if self._encoder is not None:
                self._encoder.shutdown(wait=False, cancel_futures=True)
            if asyncio.get_running_loop() is self._loop:
                await shielded(self._step_task)

    def _has_open_requests(self) -> bool:
        thread = self._thread
        unseen = self._sent > thread.stats.received
        return thread.is_alive() and (unseen or thread.open_requests > 0)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._thread.close()
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)

    def _params(
        self, sampling: SamplingParams | None, overrides: SamplingOverrides
    ) -> SamplingParams:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling={sampling!r}: accepted is a SamplingParams or None")
        params = (sampling or SamplingParams()).updated(overrides).resolved(self._defaults)
        if params.n > self._options.max_seqs:
            raise RequestError(
                f"n={params.n}: this engine runs max_seqs={self._options.max_seqs} at once"
            )
        size = self.tokenizer.vocab_size
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= size:
                    raise RequestError(
                        f"{name}: token {token} is not below the vocabulary's {size}"
                    )
        return params

    def _token_ids(self, prompt: Sequence[int]) -> Sequence[int]:
        try:
            if isinstance(prompt, bytes | bytearray | Mapping | Set):
                raise TypeError(f"it is a {type(prompt).__name__}")
            ids = array.array("q", prompt)
        except (TypeError, ValueError, OverflowError) as exc:
            raise RequestError(f"prompt: accepted is a str or token ids ({exc})") from exc
        size = self.tokenizer.vocab_size
        if len(ids) and not (min(ids) >= 0 and max(ids) < size):
            at, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < size)
            raise RequestError(f"prompt[{at}]={token}: accepted are token ids from 0 to {size - 1}")
        return ids

    def _submit(
        self,
        prepare: Prepare,
        params: SamplingParams,
        inline: bool,
        request_id: str | None,
        priority: int,
        timeout: float | None,
        cache_salt: str | None,
        prefix_cache: bool,
    ) -> Generation:
        now = time.perf_counter()
        self._check_open()
        name = self._check_name(request_id)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority={priority!r}: accepted is a whole number")
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0
        ):
            raise RequestError(f"timeout={timeout!r}: accepted is a number of seconds or None")
        if timeout is not None and timeout > FOREVER_S:
            timeout = None
        if not isinstance(prefix_cache, bool):
            raise RequestError(f"prefix_cache={prefix_cache!r}: accepted is True or False")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt={cache_salt!r}: accepted is a str or None")
        self._check_room()

        key = self._sent
        submission = Submission(
            key, now, params, deadline=None if timeout is None else now + timeout
        )
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        salt = (cache_salt or "").encode("utf-8", "surrogatepass")
        tokenizer, thread = self.tokenizer, self._thread

        def make() -> None:
            if submission.cancelled:  # nobody waits for it any more
                thread.submit(submission)
                return
            try:
                ids = prepare()
                if not len(ids):
                    raise RequestError("the prompt is empty: at least one token is needed")
                submission.request = Request(
                    name,
                    ids,
                    params,
                    seed=seed,
                    end_ids=tokenizer.eog_ids,
                    bad_words_ids=_bad_words_ids(tokenizer, params.bad_words),
                    priority=priority,
                    cache_salt=salt,
                    prefix_cache=prefix_cache,
                )
            except RequestError as exc:
                submission.error = exc
            except Exception as exc:  # whatever the tokenizer or template did, it is this request's
                submission.error = RequestError(f"the prompt could not be encoded: {exc!r}")
                submission.error.__cause__ = exc
            thread.submit(submission)

        def cancel() -> None:
            submission.cancelled = True
            thread.cancel(key)

        def prompt_tokens() -> int:
            return len(submission.request.prompt_ids) if submission.request is not None else 0

        generation = Generation(
            key,
            name,
            n=params.n,
            wants_logprobs=params.logprobs is not None,
            created_at=now,
            loop=self._loop,
            cancel=cancel,
            prompt_tokens=prompt_tokens,
            engine=self,
        )
        self._delivery.add(generation)
        self._sent += 1
        if inline and len(params.bad_words) <= INLINE_BAD_WORDS:
            make()
        else:
            thread.submit(submission)
            if self._encoder is None:
                self._encoder = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-encode")
            self._encoder.submit(make)
        return generation

    def _check_open(self) -> None:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            raise RuntimeError(
                "a request needs a running event loop: call it from async code"
            ) from None
        if not here:
            raise RuntimeError(
                "this engine belongs to another event loop: use it on the loop that loaded it, "
                "or load one for this loop"
            )
        if self._delivery.cause is not None:
            raise self._delivery.dead_error()
        if self._closed or self._delivery.ended.done():
            raise EngineClosedError("the engine is closed")

    def _check_name(self, request_id: str | None) -> str:
        if request_id is None:
            return f"request-{next(self._names)}"  # a name for people; events go by key
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r}: accepted is a non-empty str")
        if self._delivery.is_open(request_id):
            raise RequestError(f"request_id={request_id!r}: a request of that name is open")
        return request_id

    def _check_room(self) -> None:
        bound = self._options.max_waiting
        if bound is None:
            return
        stats = self._thread.stats
        # Requests on their way to the thread take the free places, unless others wait for blocks.
        free = 0 if stats.waiting else max(0, self._options.max_seqs - stats.running)
        would_wait = stats.waiting + (self._sent - stats.received) + 1 - free
        if would_wait > bound:
            raise QueueFullError(
                f"{would_wait - 1} requests wait already: max_waiting={bound} is reached"
            )


def _bad_words_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Every word as it is spelled at the start of a text and after a space."""
    spellings = dict.fromkeys(
        tuple(tokenizer.encode(spelling, add_special_tokens=False))
        for word in words
        for spelling in (word, word.lstrip(), f" {word.lstrip()}")
        if spelling.strip() or spelling == word
    )
    return tuple(ids for ids in spellings if ids)
