"""The threads that run a step together, phase after phase, without Python and its lock.

A phase is cut into units. One word holds the number of the current phase and the next unit; a
thread takes a unit by adding one to it, if the word is still what it read. Whoever completes a
phase's last unit publishes the next phase, by which everything it did becomes visible. So nobody
waits for a thread that is not there: the others do its units. A thread that held one while the
system gave its core away is waited for, briefly in a loop, then asleep, which leaves the core to
whom it may be that holds the missing unit. Numbers of phases come again only after 2**32 of them,
so what a thread read before it was put aside can make it take nothing.

Who asks for a step may go on at once, and ask for the same phases once more before they are over.
Where there is a core for it, that is all it does, asleep until a step is over; otherwise it takes
part from the moment it waits, so that what it does meanwhile takes no core from a thread that holds
a unit.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from asyncllm import telemetry
from asyncllm.kernels.cpu import vectors as v
from asyncllm.kernels.cpu.compiled import KernelLibrary
from asyncllm.kernels.cpu.memory import call_kernel, load_i64, store_i64
from asyncllm.kernels.cpu.step import RULES, WORD

# The shared state, in bytes; what several threads write has a cache line of its own.
CLAIM: Final = 0  # number of the phase << 32 | next unit
DONE: Final = 64  # units of it that are done
END: Final = 128  # number of the phase at which the step is over
BASE: Final = 136  # number of the step's first phase, or of the same one in a step before
FIRST: Final = 144  # where in the table of phases that is
COUNT: Final = 152  # phases of the step
STOPPED: Final = 192
SLEEPERS: Final = 256
AWAITED: Final = 264  # number of the phase that somebody outside waits for; -1: nobody does
PHASES: Final = 320  # addresses
SEGMENTS: Final = 328
STEP: Final = 336
PATIENCE: Final = 344
MUTEX: Final = 384
CONDITION: Final = 512
ARRIVAL: Final = 640  # the condition of who waits outside
STATE_BYTES: Final = 768

# How often a waiting thread looks again before it sleeps: some 20 us. Longer is a little faster
# while nobody else wants the core, and clearly slower when somebody does.
LOOKS: Final = 300

PHASE_BYTES: Final = 16  # first segment, number of segments
SEGMENT_BYTES: Final = 24  # kernel, its parameters, its rule

_UNITS: Final = (1 << 32) - 1
_NUMBERS: Final = (1 << 32) - 1
_HALF: Final = 1 << 31


@intrinsic
def _read(context: Any, address: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.load_atomic(v.pointer(b, arguments[0], v.I64), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _write(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        b.atomic_rmw("xchg", v.pointer(b, arguments[0], v.I64), arguments[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _increase(context: Any, address: Any, by: Any) -> Any:
    """Add; gives the sum."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        place = v.pointer(b, arguments[0], v.I64)
        return b.add(b.atomic_rmw("add", place, arguments[1], "seq_cst"), arguments[1])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _exchange(context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write the value if the expected one is there; whether it was."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        place = v.pointer(b, arguments[0], v.I64)
        found = b.cmpxchg(place, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return b.extract_value(found, 1)

    return types.boolean(*[types.int64] * 3), generate


@intrinsic
def _pause(context: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            b.call(v.declared(b, "llvm.x86.sse2.pause", ir.VoidType()), [])
        elif platform.machine() in ("arm64", "aarch64"):
            hint = v.declared(b, "llvm.aarch64.hint", ir.VoidType(), v.I32)
            b.call(hint, [ir.Constant(v.I32, 1)])
        return context.get_dummy_value()

    return types.void(), generate


def _posix(name: str, parameters: int) -> Any:
    """A function of the system's threads library that takes addresses."""

    def called(context: Any, *_: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            kind = v.I8.as_pointer()
            function = v.declared(b, name, v.I32, *[kind] * parameters)
            b.call(function, [b.inttoptr(argument, kind) for argument in arguments])
            return context.get_dummy_value()

        return types.void(*[types.int64] * parameters), generate

    if parameters == 1:
        return intrinsic(lambda context, one: called(context))
    return intrinsic(lambda context, one, two: called(context))


_lock = _posix("pthread_mutex_lock", 1)
_unlock = _posix("pthread_mutex_unlock", 1)
_wake_all = _posix("pthread_cond_broadcast", 1)
_sleep = _posix("pthread_cond_wait", 2)


@numba.njit(nogil=True)
def _wake(state: int) -> None:
    if _read(state + SLEEPERS) > 0:
        _lock(state + MUTEX)
        _wake_all(state + CONDITION)
        _unlock(state + MUTEX)


@numba.njit(nogil=True)
def _announce(state: int, number: int) -> None:
    """Wake who waits for a phase that was published."""
    _wake(state)
    if _read(state + AWAITED) == number & _NUMBERS:
        _lock(state + MUTEX)
        _wake_all(state + ARRIVAL)
        _unlock(state + MUTEX)


@numba.njit(nogil=True)
def _unchanged(state: int, number: int, end: int) -> bool:
    return (
        (_read(state + CLAIM) >> 32) & _NUMBERS == number
        and _read(state + END) == end
        and _read(state + STOPPED) == 0
    )


@numba.njit(nogil=True)
def _wait(state: int, number: int, end: int) -> None:
    """Until another phase is published, a step begins, or all is over."""
    for _ in range(load_i64(state + PATIENCE)):
        if not _unchanged(state, number, end):
            return
        _pause()
    _lock(state + MUTEX)
    _increase(state + SLEEPERS, 1)
    while _unchanged(state, number, end):
        _sleep(state + CONDITION, state + MUTEX)
    _increase(state + SLEEPERS, -1)
    _unlock(state + MUTEX)


@numba.njit(nogil=True)
def _units(state: int, phase: int) -> int:
    segments = load_i64(state + SEGMENTS) + load_i64(phase) * SEGMENT_BYTES
    step, units = load_i64(state + STEP), 0
    for index in range(load_i64(phase + 8)):
        rule = load_i64(segments + index * SEGMENT_BYTES + 16)
        units += load_i64(step + WORD * (RULES + 2 * rule))
    return units


@numba.njit(nogil=True)
def _run_unit(state: int, phase: int, unit: int, thread: int) -> None:
    segment = load_i64(state + SEGMENTS) + load_i64(phase) * SEGMENT_BYTES
    step = load_i64(state + STEP)
    while True:
        units = load_i64(step + WORD * (RULES + 2 * load_i64(segment + 16)))
        if unit < units:
            break
        unit -= units
        segment += SEGMENT_BYTES
    call_kernel(load_i64(segment), load_i64(segment + 8), step, unit, thread)


@numba.njit(nogil=True)
def _reached(state: int, number: int) -> bool:
    """Whether a phase was, which may have been passed."""
    return (((_read(state + CLAIM) >> 32) - number) & _NUMBERS) < _HALF


@numba.njit(nogil=True)
def _work(state: int, thread: int, until: int) -> None:
    """Until a phase is reached; below 0: until all is over."""
    while until < 0 or not _reached(state, until):
        claim = _read(state + CLAIM)
        number = (claim >> 32) & _NUMBERS
        end = _read(state + END)
        if number == end:
            # The phase that is waited for may have ended since it was looked for.
            if until >= 0 or _read(state + STOPPED) != 0:
                return
            _wait(state, number, end)
            continue
        index = (number - load_i64(state + BASE)) & _NUMBERS
        count, first = load_i64(state + COUNT), load_i64(state + FIRST)
        if index >= 2 * count or _read(state + CLAIM) != claim:
            continue  # a step ended and another began while this thread looked
        if index >= count:
            index -= count
        phase = load_i64(state + PHASES) + (first + index) * PHASE_BYTES
        units, unit = _units(state, phase), claim & _UNITS
        if unit >= units > 0:
            _wait(state, number, end)
        elif units == 0:
            if _exchange(state + CLAIM, claim, (number + 1) << 32):
                _announce(state, number + 1)
        elif _exchange(state + CLAIM, claim, claim + 1):
            _run_unit(state, phase, unit, thread)
            if _increase(state + DONE, 1) == units:
                _write(state + DONE, 0)
                _write(state + CLAIM, (number + 1) << 32)
                _announce(state, number + 1)


def _begin(state: int, first: int, count: int, _thread: int) -> None:
    end = _read(state + END)
    if (_read(state + CLAIM) >> 32) & _NUMBERS == end:
        # Nobody reads these before the end changes, or believes what it read.
        store_i64(state + BASE, end)
        store_i64(state + FIRST, first)
        store_i64(state + COUNT, count)
    else:
        # The same phases are being run: counted from here their places are the same.
        store_i64(state + BASE, (end - count) & _NUMBERS)
    _write(state + END, (end + count) & _NUMBERS)
    _wake(state)


def _take_part(state: int, until: int, _count: int, thread: int) -> None:
    _work(state, thread, until)


def _sleep_until(state: int, number: int, _count: int, _thread: int) -> None:
    _lock(state + MUTEX)
    _write(state + AWAITED, number)
    while not _reached(state, number):
        _sleep(state + ARRIVAL, state + MUTEX)
    _write(state + AWAITED, -1)
    _unlock(state + MUTEX)


def can_team() -> bool:
    """Whether the system has what threads sleep on."""
    return hasattr(ctypes.pythonapi, "pthread_cond_wait")


class Team:
    """Threads that run steps.

    Args:
        library: compiles the loop.
        phases: int64 [phases, 2]; first segment, number of segments.
        segments: int64 [segments, 3]; kernel, parameters, rule.
        step: the record that kernels read, int64.
        threads: how many.
        helps: whether the caller is one of them, while it waits. It is, too, where the system gives
            no other thread.

    Attributes:
        threads: those that are not the caller's.
    """

    def __init__(
        self,
        library: KernelLibrary,
        phases: Any,
        segments: Any,
        step: Any,
        threads: int,
        *,
        helps: bool = True,
    ) -> None:
        self._arrays = (phases, segments, step)  # which must stay where they are
        memory = np.zeros(STATE_BYTES + 64, np.uint8)
        start = -memory.ctypes.data % 64
        self._state = memory[start : start + STATE_BYTES]
        self._address = self._state.ctypes.data
        self._words = words = self._state.view(np.int64)
        for place, array in zip((PHASES, SEGMENTS, STEP), self._arrays, strict=True):
            words[place // 8] = array.ctypes.data
        words[PATIENCE // 8] = LOOKS
        words[AWAITED // 8] = -1
        self._library = library
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)  # calls of it release the lock
        self._begin = function(library.address("team-begin", lambda: _begin))
        self._sleep = function(library.address("team-sleep", lambda: _sleep_until))
        self._work = function(library.address("team-work", lambda: _take_part))
        self._stop = function(library.address("team-stop", lambda: _end))
        self.threads: list[threading.Thread] = []
        if can_team():
            self._start(threads, 1 if helps else 0)
        self.helps = helps or not self.threads

    def _start(self, threads: int, first: int) -> None:
        for name, place in (("mutex", MUTEX), ("cond", CONDITION), ("cond", ARRIVAL)):
            getattr(ctypes.pythonapi, f"pthread_{name}_init")(
                ctypes.c_void_p(self._address + place), None
            )
        for number in range(first, threads):
            thread = threading.Thread(
                target=_forever(self._work),
                args=(self._address, number),
                name=f"asyncllm-worker-{number}",
                daemon=False,
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more: those that run do the work
                telemetry.record("worker-not-started", worker=number, error=str(error))
                break
            self.threads.append(thread)

    @property
    def size(self) -> int:
        """How many work on a step."""
        return len(self.threads) + self.helps

    def begin(self, first: int, count: int) -> int:
        """Ask for `count` phases from number `first` on; for `wait`.

        What was asked for before must be over, or be the same phases, once.
        """
        self._begin(self._address, first, count, 0)
        return int(self._words[END // 8])

    def wait(self, asked: int) -> None:
        """Return when what `begin` gave this for is over."""
        (self._work if self.helps else self._sleep)(self._address, asked, 0, 0)

    def run(self, first: int, count: int) -> None:
        """Run `count` phases from number `first` on; returns when all are done."""
        self.wait(self.begin(first, count))

    def close(self) -> None:
        """End the threads, after what they were asked for. Idempotent."""
        if self.threads:
            self._stop(self._address, 0, 0, 0)
            for thread in self.threads:
                thread.join()
            self.threads.clear()


def _end(state: int, _first: int, _count: int, _thread: int) -> None:
    _write(state + STOPPED, 1)
    _wake(state)


def _forever(work: Callable[..., None]) -> Callable[[int, int], None]:
    def run(address: int, number: int) -> None:
        work(address, -1, 0, number)

    return run
