"""The threads that run a step together, phase after phase, without Python and its lock.

A phase is cut into units. One word holds the number of the current phase and the next unit; a
thread takes a unit by adding one to it, if the word is still what it read. Whoever completes a
phase's last unit publishes the next phase, by which everything it did becomes visible. So nobody
waits for a thread that is not there: the others do its units. A thread that held one while the
system gave its core away is waited for, briefly in a loop, then asleep, which leaves the core to
whom it may be that holds the missing unit. Numbers of phases come again only after 2**32 of them,
so what a thread read before it was put aside can make it take nothing.
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
BASE: Final = 136  # number of the step's first phase
FIRST: Final = 144  # where in the table of phases that is
COUNT: Final = 152  # phases of the step
STOPPED: Final = 192
SLEEPERS: Final = 256
PHASES: Final = 320  # addresses
SEGMENTS: Final = 328
STEP: Final = 336
PATIENCE: Final = 344
MUTEX: Final = 384
CONDITION: Final = 512
STATE_BYTES: Final = 640

# How often a waiting thread looks again before it sleeps: some 20 us. Longer is a little faster
# while nobody else wants the core, and clearly slower when somebody does.
LOOKS: Final = 300

PHASE_BYTES: Final = 16  # first segment, number of segments
SEGMENT_BYTES: Final = 24  # kernel, its parameters, its rule

_UNITS: Final = (1 << 32) - 1
_NUMBERS: Final = (1 << 32) - 1


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
def _work(state: int, thread: int, leads: bool) -> None:
    while True:
        claim = _read(state + CLAIM)
        number = (claim >> 32) & _NUMBERS
        end = _read(state + END)
        if number == end:
            if leads or _read(state + STOPPED) != 0:
                return
            _wait(state, number, end)
            continue
        index = (number - load_i64(state + BASE)) & _NUMBERS
        count, first = load_i64(state + COUNT), load_i64(state + FIRST)
        if index >= count or _read(state + CLAIM) != claim:
            continue  # a step ended and another began while this thread looked
        phase = load_i64(state + PHASES) + (first + index) * PHASE_BYTES
        units, unit = _units(state, phase), claim & _UNITS
        if unit >= units > 0:
            _wait(state, number, end)
        elif units == 0:
            if _exchange(state + CLAIM, claim, (number + 1) << 32):
                _wake(state)
        elif _exchange(state + CLAIM, claim, claim + 1):
            _run_unit(state, phase, unit, thread)
            if _increase(state + DONE, 1) == units:
                _write(state + DONE, 0)
                _write(state + CLAIM, (number + 1) << 32)
                _wake(state)


def _lead(state: int, first: int, count: int, thread: int) -> None:
    number = (_read(state + CLAIM) >> 32) & _NUMBERS
    # Nobody reads these before the end changes, or believes what it read.
    store_i64(state + BASE, number)
    store_i64(state + FIRST, first)
    store_i64(state + COUNT, count)
    _write(state + END, (number + count) & _NUMBERS)
    _wake(state)
    _work(state, thread, True)


def _follow(state: int, _first: int, _count: int, thread: int) -> None:
    _work(state, thread, False)


def can_team() -> bool:
    """Whether the system has what threads sleep on."""
    return hasattr(ctypes.pythonapi, "pthread_cond_wait")


class Team:
    """Some threads, of which the caller is one.

    Args:
        library: compiles the loop.
        phases: int64 [phases, 2]; first segment, number of segments.
        segments: int64 [segments, 3]; kernel, parameters, rule.
        step: the record that kernels read, int64.
        threads: how many, the caller included.
    """

    def __init__(
        self, library: KernelLibrary, phases: Any, segments: Any, step: Any, threads: int
    ) -> None:
        self._arrays = (phases, segments, step)  # which must stay where they are
        memory = np.zeros(STATE_BYTES + 64, np.uint8)
        start = -memory.ctypes.data % 64
        self._state = memory[start : start + STATE_BYTES]
        self._address = self._state.ctypes.data
        words = self._state.view(np.int64)
        for place, array in zip((PHASES, SEGMENTS, STEP), self._arrays, strict=True):
            words[place // 8] = array.ctypes.data
        words[PATIENCE // 8] = LOOKS
        self._library = library
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)  # calls of it release the lock
        self._lead = function(library.address("team-lead", lambda: _lead))
        follow = function(library.address("team-follow", lambda: _follow))
        self._stop = function(library.address("team-stop", lambda: _end))
        self.threads: list[threading.Thread] = []
        if threads > 1:
            for name, place in (("mutex", MUTEX), ("cond", CONDITION)):
                getattr(ctypes.pythonapi, f"pthread_{name}_init")(
                    ctypes.c_void_p(self._address + place), None
                )
        for number in range(1, threads):
            thread = threading.Thread(
                target=_forever(follow),
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

    def run(self, first: int, count: int) -> None:
        """Run `count` phases from number `first` on; returns when all are done."""
        self._lead(self._address, first, count, 0)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self.threads:
            self._stop(self._address, 0, 0, 0)
            for thread in self.threads:
                thread.join()
            self.threads.clear()


def _end(state: int, _first: int, _count: int, _thread: int) -> None:
    _write(state + STOPPED, 1)
    _wake(state)


def _forever(follow: Callable[..., None]) -> Callable[[int, int], None]:
    def run(address: int, number: int) -> None:
        follow(address, 0, 0, number)

    return run
