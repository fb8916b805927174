"""The event loop's end of the wire: takes what the engine thread posts to where it belongs."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncllm import telemetry
from asyncllm.errors import EngineClosedError, EngineDeadError
from asyncllm.events import Delta, Done, Event
from asyncllm.generation import Generation
from asyncllm.info import LoadProgress

if TYPE_CHECKING:
    from asyncllm.engine_thread import Face


class Delivery:
    """Hands events to generations, which it holds weakly.

    The `post_*` methods are called by the engine thread; everything else stays on the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_progress: Callable[[LoadProgress], object] | None = None,
    ) -> None:
        self._loop = loop
        self._on_progress = on_progress
        self._generations: weakref.WeakValueDictionary[int, Generation] = (
            weakref.WeakValueDictionary()
        )
        self.loaded: asyncio.Future[Face] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.cause: BaseException | None = None

    # From the engine thread.

    def post(self, events: list[Event]) -> bool:
        return self._call(self._deliver, events)

    def post_progress(self, report: LoadProgress) -> None:
        if self._on_progress is not None:
            self._call(self._report, report)

    def post_loaded(self, face: Face) -> None:
        self._call(self._set_loaded, face)

    def post_ended(self, error: BaseException | None) -> None:
        self._call(self._set_ended, error)

    def is_gone(self) -> bool:
        return self._loop.is_closed()

    def _call(self, callback: Callable[..., None], argument: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:  # the loop was closed; nobody is left to tell
            return False
        return True

    # On the loop.

    def add(self, generation: Generation) -> None:
        self._generations[generation._key] = generation

    def is_open(self, request_id: str) -> bool:
        return any(generation.request_id == request_id for generation in self.open())

    def open(self) -> list[Generation]:
        """The generations that somebody still holds and that have not ended."""
        return [g for g in self._generations.values() if not g.done]

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            generation = self._generations.get(event.key)
            if generation is None:
                continue
            if isinstance(event, Delta):
                generation._receive(event)
            else:
                generation._finish(event)
                del self._generations[event.key]

    def _report(self, report: LoadProgress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(report)
        except Exception as exc:
            telemetry.record("progress-callback-failed", level=logging.ERROR, error=repr(exc))

    def _set_loaded(self, face: Face) -> None:
        if not self.loaded.done():
            self.loaded.set_result(face)

    def _set_ended(self, error: BaseException | None) -> None:
        self.cause = error
        if not self.loaded.done():
            # Nobody may be waiting any more (a cancelled load): retrieve what is set.
            self.loaded.set_exception(error or EngineDeadError("loading was given up"))
            self.loaded.exception()
        if not self.ended.done():
            self.ended.set_result(None)
        # After an orderly end only those are left that were still being encoded.
        for generation in self.open():
            why = self.dead_error() if error else EngineClosedError("the engine was closed")
            generation._finish(Done(generation._key, error=why))

    def dead_error(self) -> EngineDeadError:
        """A fresh error that says why the thread ended, chained to the cause."""
        error = EngineDeadError(f"the engine thread ended: {self.cause!r}")
        error.__cause__ = self.cause
        return error
