"""The one thread that owns scheduler, runner and device.

It talks to the event loop through a command queue (in) and one post a step (out); the two never
wait for each other.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncllm.errors import AsyncLLMError, EngineClosedError, RequestError
from asyncllm.events import Delta, Done, Event, Logprob
from asyncllm.info import EngineStats, LoadProgress, ModelInfo
from asyncllm.options import SamplingParams
from asyncllm.scheduler.request import Request
from asyncllm.scheduler.scheduler import Emission, NoPlan, Scheduler
from asyncllm.scheduler.step import Runner, StepInterrupted, Ticket, TokenLogprob

IDLE_LOOK_S = 0.5  # how often an idle thread looks whether anybody is still there
SAVE_AT_END_S = 2.0  # for what the block store has not got yet when the engine is closed


class TextStream(Protocol):
    """Makes one output's text from its tokens, see `text/stream.py`."""

    def feed(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Take tokens; give the text that is settled, and the stop string that was met."""

    def flush(self) -> str:
        """Give what was held back."""


@dataclass(frozen=True, slots=True)
class Face:
    """What the event loop sees of a loaded model: nothing that holds weights or K/V."""

    info: ModelInfo
    tokenizer: Any
    generation_defaults: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """What loading built, all of it owned by the engine thread from then on."""

    face: Face
    scheduler: Scheduler
    runner: Runner
    new_text: Callable[[SamplingParams], TextStream]
    token_text: Callable[[int], str]
    pool_bytes: Callable[[], int]
    close: Callable[[], None]


class Loading(Protocol):
    """What `build` may call while it runs."""

    def progress(self, report: LoadProgress) -> None:
        """Tell the application how far loading is."""

    def should_stop(self) -> bool:
        """Whether to give up: the load was cancelled or the process is ending."""


@dataclass(slots=True)
class Submission:
    """A request on its way to the engine thread; `cancelled` may be set from any thread.

    It is submitted when it is made, and again once its prompt is encoded, if that took a while:
    so a deadline holds and a cancel is answered meanwhile.
    """

    key: int
    created_at: float
    params: SamplingParams
    deadline: float | None = None
    request: Request | None = None
    error: Exception | None = None
    cancelled: bool = False
    scheduled: bool = False
    ended: bool = False
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)


class Mailbox(Protocol):
    """The event loop's end of the wire. Every method may be called from the engine thread."""

    def post(self, events: list[Event]) -> bool:
        """Hand a step's events over; False when the loop is gone."""

    def post_progress(self, report: LoadProgress) -> None:
        """Hand a load report over."""

    def post_loaded(self, face: Face) -> None:
        """Loading is done."""

    def post_ended(self, error: BaseException | None) -> None:
        """The thread's last word; `error` is what nobody asked for."""

    def is_gone(self) -> bool:
        """Whether the loop is closed for good."""


class EngineThread:
    """Runs `build` and then the step loop until it is closed.

    Args:
        build: makes the parts; called on the thread.
        mailbox: where events go.
    """

    def __init__(self, build: Callable[[Loading], Parts], mailbox: Mailbox) -> None:
        self._build = [build]  # taken out once used: nothing of loading outlives it
        self._mailbox = mailbox
        self._commands: queue.SimpleQueue[Submission | int | None] = queue.SimpleQueue()
        self._open: dict[int, Submission] = {}
        self._submissions: dict[Request, Submission] = {}  # those that the scheduler has
        self._deadlines: list[tuple[float, int]] = []
        self._events: list[Event] = []
        self._outstanding: Ticket | None = None
        self._closing = False
        self._awaits_store = False
        self._host_s = 0.0
        self._waited_s = 0.0  # in this turn
        self._received = self._finished = self._cancelled = self._failed = 0
        self._parts: Parts | None = None
        self._published: dict[str, Any] = {}
        # Not a daemon: a daemon inside torch while the interpreter ends aborts the process.
        self._thread = threading.Thread(target=self._run, name="asyncllm-engine", daemon=False)

    # Called from any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(self, submission: Submission) -> None:
        self._commands.put(submission)

    def cancel(self, key: int) -> None:
        self._commands.put(key)

    def close(self) -> None:
        """End the thread, at the latest when the step in flight ends. Idempotent."""
        self._closing = True
        self._commands.put(None)

    @property
    def stats(self) -> EngineStats:
        """What was published last, one dict a step: the object is made by who reads it."""
        return EngineStats(**self._published)

    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def should_stop(self) -> bool:
        """Whether a long step or load is to be given up."""
        return self._closing or not threading.main_thread().is_alive()

    def progress(self, report: LoadProgress) -> None:
        self._mailbox.post_progress(report)

    # On the thread.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._take_over(self._build.pop())
            self._loop()
        except BaseException as exc:  # whatever it is, the open requests must hear of it
            error = exc
        try:
            self._wind_up(orderly=error is None)
        except BaseException as exc:
            error = error or exc
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # they hold the weights
        self._mailbox.post_ended(error)

    def _take_over(self, build: Callable[[Loading], Parts]) -> None:
        self._parts = build(self)
        self._scheduler, self._runner = self._parts.scheduler, self._parts.runner
        if self._scheduler.transfers is not None:
            # A step may be waiting for it, or a block for a slot.
            self._scheduler.transfers.store.on_progress(lambda: self._commands.put(None))
        self._publish()
        self._mailbox.post_loaded(self._parts.face)

    def _wind_up(self, *, orderly: bool) -> None:
        parts, self._parts = self._parts, None
        if parts is None:
            return
        if orderly:
            for submission in list(self._open.values()):
                self._end(submission, EngineClosedError("the engine was closed"))
            with contextlib.suppress(StepInterrupted):
                self._save_what_is_left()
        del self._scheduler, self._runner
        parts.close()
        self._published = {
            "received": self._received,
            "steps": self.stats.steps,
            "host_s": self.stats.host_s,
            "finished": self._finished,
            "cancelled": self._cancelled,
            "failed": self._failed,
        }
        self._post()

    def _loop(self) -> None:
        while True:
            started = time.perf_counter()
            has_work = self._scheduler.has_work and not self._awaits_store
            busy = has_work or self._outstanding is not None
            self._take_commands(wait=not busy)
            self._awaits_store = False
            if not busy:  # what went by until a command came is nobody's work
                started = time.perf_counter()
            if self.should_stop() or self._mailbox.is_gone():
                return
            self._expire()
            self._waited_s = 0.0
            if self._scheduler.has_work or self._outstanding is not None:
                try:
                    self._step()
                except StepInterrupted:
                    continue  # only raised when this thread is to end
            self._publish()
            if not self._post():
                return
            self._host_s += time.perf_counter() - started - self._waited_s

    @property
    def _loaded(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("the engine thread has no model")
        return self._parts

    def _take_commands(self, *, wait: bool) -> None:
        if wait:
            if not self._awaits_store:
                self._scheduler.check()
            try:
                self._take(self._commands.get(timeout=self._patience()))
            except queue.Empty:
                return
        while True:
            try:
                self._take(self._commands.get_nowait())
            except queue.Empty:
                return

    def _patience(self) -> float:
        if not self._deadlines:
            return IDLE_LOOK_S
        return min(IDLE_LOOK_S, max(0.0, self._deadlines[0][0] - time.perf_counter()))

    def _take(self, command: Submission | int | None) -> None:
        if isinstance(command, Submission):
            self._admit(command)
        elif command is not None and command in self._open:
            self._end(self._open[command], None)

    def _admit(self, submission: Submission) -> None:
        if submission.ended:
            return  # while its prompt was encoded
        if submission.key not in self._open:
            self._received += 1
            self._open[submission.key] = submission
            if submission.deadline is not None:
                heapq.heappush(self._deadlines, (submission.deadline, submission.key))
        request = submission.request
        if submission.cancelled:
            self._end(submission, None)
        elif submission.error is not None:
            self._end(submission, submission.error)
        elif request is not None and not submission.scheduled:  # both messages may find it encoded
            for sequence in request.sequences:
                sequence.text = self._loaded.new_text(submission.params)
            try:
                self._scheduler.add(request)
            except AsyncLLMError as exc:
                self._end(submission, exc)
                return
            submission.scheduled = True
            self._submissions[request] = submission

    def _expire(self) -> None:
        now = time.perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            submission = self._open.get(heapq.heappop(self._deadlines)[1])
            if submission is not None:
                after = now - submission.created_at
                self._end(submission, TimeoutError(f"the request timed out after {after:.3f} s"))

    def _end(self, submission: Submission, error: Exception | None) -> None:
        """End an open request from outside: cancelled, timed out, closed, or never begun."""
        request = submission.request
        ended = self._scheduler.cancel(request) if request and submission.scheduled else ()
        for sequence in ended:
            self._events.append(
                Delta(
                    submission.key,
                    sequence.index,
                    text=sequence.text.flush(),
                    finish_reason="cancelled",
                )
            )
        self._done(submission, error, whole=False)

    def _done(self, submission: Submission, error: BaseException | None, *, whole: bool) -> None:
        del self._open[submission.key]
        submission.ended = True
        if submission.request is not None:
            self._submissions.pop(submission.request, None)
        if whole:
            self._finished += 1
        elif isinstance(error, RequestError):
            self._failed += 1
        else:
            self._cancelled += 1
        created = submission.created_at
        sequences = submission.request.sequences if submission.request is not None else ()
        admitted = [s.admitted_at for s in sequences if s.admitted_at is not None]
        first = [s.first_token_at for s in sequences if s.first_token_at is not None]
        wanted = submission.params.prompt_logprobs is not None
        self._events.append(
            Done(
                submission.key,
                cached_tokens=sequences[0].cached_tokens if sequences else 0,
                queued_s=(min(admitted) if admitted else time.perf_counter()) - created,
                first_token_s=min(first) - created if first else None,
                prompt_logprobs=(None, *submission.prompt_logprobs) if wanted else None,
                error=error,
            )
        )

    def _step(self) -> None:
        plan = self._scheduler.plan()
        if plan is NoPlan.COLLECT_FIRST:
            self._finish_outstanding()
            plan = self._scheduler.plan()
        if isinstance(plan, NoPlan):
            self._awaits_store = plan is NoPlan.AWAIT_STORE
            if self._outstanding is None and self._scheduler.has_work and not self._awaits_store:
                raise RuntimeError(f"the scheduler has work but plans none ({plan.name})")
            self._finish_outstanding()
            return
        if self._runner.overlaps(plan):
            # The step before is read, worded and posted while this one is computed.
            ticket = self._runner.submit(plan)
            self._finish_outstanding()
            self._outstanding = ticket
        else:
            self._finish_outstanding()
            self._finish(self._runner.submit(plan))

    def _save_what_is_left(self) -> None:
        """Let the block store have, in bounded time, what the last requests leave behind."""
        if self._scheduler.transfers is None:
            return
        if self._outstanding is not None:
            self._scheduler.commit(self._runner.collect(self._outstanding), {})
        until = time.perf_counter() + SAVE_AT_END_S
        while self._scheduler.has_work and (left := until - time.perf_counter()) > 0:
            plan = self._scheduler.plan()
            if not isinstance(plan, NoPlan):
                self._scheduler.commit(self._runner.collect(self._runner.submit(plan)), {})
            elif plan is NoPlan.AWAIT_STORE:
                with contextlib.suppress(queue.Empty):
                    self._commands.get(timeout=left)

    def _finish_outstanding(self) -> None:
        if self._outstanding is not None:
            ticket, self._outstanding = self._outstanding, None
            self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        result = self._runner.collect(ticket)
        self._waited_s += result.waited_s
        self._take_commands(wait=False)  # a request cancelled during the step has no results
        texts: dict[int, str] = {}
        stops: dict[int, str] = {}
        for row in result.rows:
            sequence = self._scheduler.live(row)
            if sequence is None or row.token is None or row.error is not None:
                continue
            if (
                sequence.ends_with(row.token)
                and not sequence.request.params.include_stop_str_in_output
            ):
                continue
            text, stop = sequence.text.feed((row.token,))
            texts[sequence.sequence_id] = text
            if stop is not None:
                stops[sequence.sequence_id] = stop
        emissions = self._scheduler.commit(result, stops)
        for emission in emissions:
            self._emit(emission, texts.get(emission.sequence.sequence_id, ""))
        for request in dict.fromkeys(e.sequence.request for e in emissions if e.finished):
            if request.done and request in self._submissions:
                errors = (s.error for s in request.sequences if s.error is not None)
                error = next(errors, None)
                self._done(self._submissions[request], error, whole=error is None)

    def _emit(self, emission: Emission, text: str) -> None:
        sequence = emission.sequence
        submission = self._submissions.get(sequence.request)
        if submission is None:
            return
        for entry in emission.prompt_logprobs:
            submission.prompt_logprobs.append(self._worded(entry))
        if emission.finished:
            text += sequence.text.flush()
        if emission.token is not None or emission.finished:
            logprob = emission.logprob
            self._events.append(
                Delta(
                    submission.key,
                    sequence.index,
                    text=text,
                    token_ids=() if emission.token is None else (emission.token,),
                    logprobs=() if logprob is None else (self._worded(logprob),),
                    finish_reason=sequence.finish_reason,
                    stop=sequence.stop,
                )
            )

    def _worded(self, entry: TokenLogprob) -> Logprob:
        text = self._loaded.token_text
        top = tuple(Logprob(token, text(token), value) for token, value in entry.top)
        return Logprob(entry.token_id, text(entry.token_id), entry.logprob, top)

    def _post(self) -> bool:
        if not self._events:
            return True
        events, self._events = self._events, []
        return self._mailbox.post(events)

    def _store_counts(self) -> dict[str, int]:
        transfers = self._scheduler.transfers
        return {} if transfers is None else transfers.store.counts

    def _publish(self) -> None:
        scheduler, cache = self._scheduler, self._scheduler.cache
        total, used, cached, free, growths = cache.counts()
        self._published = {
            "received": self._received,
            "waiting": scheduler.waiting,
            "running": scheduler.running,
            "prefilling": scheduler.prefilling,
            "decoding": scheduler.decoding,
            "admitted": scheduler.admitted,
            "preempted": scheduler.preempted,
            "resumed": scheduler.resumed,
            "finished": self._finished,
            "cancelled": self._cancelled,
            "failed": self._failed,
            "steps": scheduler.steps,
            "host_s": self._host_s,
            "kv_blocks_total": total,
            "kv_blocks_used": used,
            "kv_blocks_cached": cached,
            "kv_blocks_free": free,
            "kv_pool_bytes": self._loaded.pool_bytes(),
            "kv_pool_growths": growths,
            "prefix_hit_tokens": cache.prefix_hit_tokens,
            **self._store_counts(),
            "decode_mode": scheduler.decode_mode,
            "decode_mode_reason": scheduler.decode_mode_reason,
            "launch_failures": scheduler.launch_failures,
            "weights_bytes": self._loaded.face.info.weights_bytes,
        }
