"""The team runs every unit of every phase once, in order, and leaves the cores alone when idle."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from asyncllm.kernels.cpu import team as team_module
from asyncllm.kernels.cpu.compiled import KernelLibrary
from asyncllm.kernels.cpu.memory import load_i64, store_i64
from asyncllm.kernels.cpu.step import RULES, WORD
from asyncllm.kernels.cpu.team import CLAIM, END, Team, can_team
from tests.cpu_kernels import Array, library

pytestmark = pytest.mark.skipif(not can_team(), reason="this system's threads cannot wait")

# The record of the kernel of these tests, in words: where units are counted; the counts of the
# phase before, and how many of them; where it is noted if one is missing; where units are counted
# by thread; how long a unit takes, and how much longer on a thread that is not the caller; what
# the time is spent on.
COUNTS, BEFORE, UNITS_BEFORE, WRONG, THREADS, TURNS, WORKER_TURNS, RESULT = range(8)


def counting() -> Callable[[int, int, int, int], None]:
    def kernel(p: int, step: int, unit: int, thread: int) -> None:
        place = load_i64(p + WORD * COUNTS) + WORD * unit
        before = load_i64(p + WORD * BEFORE)
        for index in range(load_i64(p + WORD * UNITS_BEFORE)):
            if load_i64(before + WORD * index) != load_i64(place) + 1:
                store_i64(load_i64(p + WORD * WRONG), 1)
        turns = load_i64(p + WORD * TURNS)
        if thread > 0:
            turns += load_i64(p + WORD * WORKER_TURNS)
        number = thread
        for _ in range(turns):
            number = number * 6364136223846793005 + 1442695040888963407
        store_i64(p + WORD * RESULT, number)
        store_i64(place, load_i64(place) + 1)
        seen = load_i64(p + WORD * THREADS) + 8 * WORD * thread
        store_i64(seen, load_i64(seen) + 1)

    return kernel


class Phases:
    """Phases of counting units, some of several segments, and a team that runs them.

    Args:
        kernel: address of the counting kernel.
        sizes: for each phase the units of its segments.
        threads: of the team.
        turns: how long a unit takes.
        worker_turns: how much longer on threads that are not the caller's.
        helps: whether the caller takes part.
    """

    def __init__(
        self,
        kernel: int,
        sizes: Sequence[Sequence[int]],
        threads: int,
        turns: int = 0,
        worker_turns: int = 0,
        helps: bool = True,
    ) -> None:
        self.sizes = [list(segments) for segments in sizes]
        rules = sum(len(segments) for segments in sizes)
        self.step = np.zeros(RULES + 2 * rules, np.int64)
        self.counts = np.zeros((rules, 64), np.int64)
        self.wrong = np.zeros(1, np.int64)
        self.threads = np.zeros((8, 8), np.int64)  # a line of the cache for each thread's count
        self.records = np.zeros((rules, 8), np.int64)
        phases, segments = [], []
        number = 0
        for units in self.sizes:
            phases.append((number, len(units)))
            for count in units:
                self.step[RULES + 2 * number] = count
                self.records[number, COUNTS] = self.counts[number].ctypes.data
                self.records[number, WRONG] = self.wrong.ctypes.data
                self.records[number, TURNS] = turns
                self.records[number, WORKER_TURNS] = worker_turns
                self.records[number, THREADS] = self.threads.ctypes.data
                segments.append((kernel, self.records[number].ctypes.data, number))
                number += 1
        for (first, size), (before, count) in zip(phases[1:], phases, strict=False):
            # When a phase begins, the counts of the one before (its last segment's) are ahead by 1.
            last = before + count - 1
            self.records[first : first + size, BEFORE] = self.counts[last].ctypes.data
            self.records[first : first + size, UNITS_BEFORE] = self.step[RULES + 2 * last]
        self.team = Team(
            library(),
            np.array(phases, np.int64).reshape(-1, 2),
            np.array(segments, np.int64).reshape(-1, 3),
            self.step,
            threads,
            helps=helps,
        )

    def expected(self, times: int = 1) -> Array:
        wanted = np.zeros_like(self.counts)
        for number, units in enumerate(n for segments in self.sizes for n in segments):
            wanted[number, :units] = times
        return wanted


Make = Callable[..., Phases]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    # Not kept with the others: this file is no part of what they are found by.
    own = KernelLibrary(tmp_path_factory.mktemp("counting"))
    yield own.address("counting", counting)
    del own


@pytest.fixture
def make(kernel: int) -> Iterator[Make]:
    """Makes phases with their team, which is closed afterwards."""
    made: list[Phases] = []

    def new(*arguments: Any, **more: Any) -> Phases:
        made.append(Phases(kernel, *arguments, **more))
        return made[-1]

    yield new
    for phases in made:
        phases.team.close()


def workers() -> int:
    return sum(thread.name.startswith("asyncllm-worker") for thread in threading.enumerate())


def some_sizes(seed: int, phases: int) -> list[list[int]]:
    """Phases of one to three segments of 0 to 9 units; some have nothing to do at all."""
    rng = random.Random(seed)
    return [
        [rng.choice((0, 1, 1, 2, 3, 9)) for _ in range(rng.choice((1, 1, 2, 3)))]
        for _ in range(phases)
    ]


THREADS_OF_TEAMS = pytest.mark.parametrize("threads", [1, 2, 3, 4])


@THREADS_OF_TEAMS
def test_every_unit_runs_once_and_phases_run_in_order(make: Make, threads: int) -> None:
    phases = make(some_sizes(threads, 300), threads)
    for times in range(1, 21):
        phases.team.run(0, 300)
        assert (phases.counts == phases.expected(times)).all()
        assert not phases.wrong[0], "a phase began before the one before had ended"


@THREADS_OF_TEAMS
@pytest.mark.parametrize("helps", [True, False])
def test_a_step_may_be_asked_for_while_one_like_it_runs(
    make: Make, threads: int, helps: bool
) -> None:
    phases = make(some_sizes(threads, 300), threads, helps=helps)
    team, rng = phases.team, random.Random(threads)
    assert team.size == threads
    times, before = 0, None
    for _ in range(100):
        asked = team.begin(0, 300)
        if before is not None:
            team.wait(before)
            times += 1
            assert (phases.counts >= phases.expected(times)).all()
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.002))
        before = asked
        if rng.random() < 0.2:  # and sometimes none follows at once
            team.wait(asked)
            before, times = None, times + 1
            assert (phases.counts == phases.expected(times)).all()
    if before is not None:
        team.wait(before)
    assert (phases.counts == phases.expected(100)).all()
    assert not phases.wrong[0], "a phase began before the one before had ended"


@pytest.mark.parametrize("helps", [True, False])
def test_a_step_goes_on_while_nobody_waits_for_it(make: Make, helps: bool) -> None:
    phases = make([[4]] * 20, 2, helps=helps)
    asked = phases.team.begin(0, 20)
    limit = time.monotonic() + 30
    while not (phases.counts == phases.expected()).all():
        assert time.monotonic() < limit
        time.sleep(0.001)
    phases.team.wait(asked)
    phases.team.wait(asked)
    assert phases.threads[0, 0] == 0 or not helps, "the caller only slept"


@THREADS_OF_TEAMS
@pytest.mark.parametrize("helps", [True, False])
@pytest.mark.parametrize("bits", [31, 32])
def test_numbers_of_phases_may_wrap(make: Make, threads: int, bits: int, helps: bool) -> None:
    phases = make(some_sizes(threads, 300), threads, helps=helps)
    time.sleep(0.005)  # until the threads sleep: the numbers are no longer theirs to read
    words = phases.team._state.view(np.uint64)
    number = np.uint64((1 << bits) - 450)
    words[END // 8] = number
    words[CLAIM // 8] = number << np.uint64(32)
    for times in range(1, 4):
        phases.team.run(0, 300)
        assert (phases.counts == phases.expected(times)).all()
    assert not phases.wrong[0]


def test_a_team_works_with_the_threads_that_could_be_started(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "asyncllm-worker-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    before = workers()
    phases = make([[5], [7]], 4)
    assert workers() == before + 1
    assert phases.team.size == 2
    phases.team.run(0, 2)
    assert (phases.counts == phases.expected()).all()
    phases.team.close()
    assert workers() == before


def test_a_team_that_gets_no_thread_is_its_caller(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    phases = make([[5], [7]], 4, helps=False)
    assert phases.team.size == 1
    phases.team.run(0, 2)
    assert (phases.counts == phases.expected()).all()


def test_all_threads_take_part(make: Make) -> None:
    phases = make([[32]] * 20, 3, turns=200_000)
    done, times = phases.threads[:3, 0], 0
    # Where other programs hold the cores a worker may come too late for once.
    while times < 100 and (times == 0 or not (done > 0).all()):
        phases.team.run(0, 20)
        times += 1
    assert done.sum() == 640 * times
    assert (done > 0).all()


def test_a_part_of_the_phases_runs_alone(make: Make) -> None:
    phases = make([[1], [2, 3], [4], [5]], 2)
    phases.team.run(1, 2)
    assert phases.counts.sum(1).tolist() == [0, 2, 3, 4, 0]
    phases.team.run(3, 1)
    phases.team.run(0, 0)
    assert phases.counts.sum(1).tolist() == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("threads", [1, 3])
def test_phases_without_units_are_passed_over(make: Make, threads: int) -> None:
    phases = make([[0], [0, 0], [3], [0], [0, 2], [0]], threads)
    for _ in range(200):
        phases.team.run(0, 6)
    assert (phases.counts == phases.expected(200)).all()
    nothing = make([[0]] * 50, threads)
    nothing.team.run(0, 50)
    assert nothing.counts.sum() == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_units_may_change_from_run_to_run(make: Make, threads: int) -> None:
    phases = make([[1], [1]], threads)
    rng = np.random.default_rng(0)
    total = np.zeros(2, np.int64)
    for _ in range(500):
        units = rng.integers(0, 12, 2)
        phases.step[RULES::2] = units
        phases.records[:, UNITS_BEFORE] = 0
        phases.team.run(0, 2)
        total += units
    assert (phases.counts.sum(1) == total).all()


def cpu_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def test_idle_threads_take_no_time(make: Make) -> None:
    phases = make(some_sizes(1, 50), 4)
    phases.team.run(0, 50)
    time.sleep(0.02)  # until they are asleep
    assert cpu_seconds(lambda: time.sleep(0.5)) < 0.005
    phases.team.run(0, 50)
    assert (phases.counts == phases.expected(2)).all(), "they wake again"


def test_closing_ends_the_threads_and_may_be_repeated(make: Make) -> None:
    before = workers()
    phases = make([[8]], 4)
    assert workers() == before + 3
    phases.team.run(0, 1)
    phases.team.close()
    assert workers() == before
    phases.team.close()


def test_a_team_that_never_ran_closes(make: Make) -> None:
    before = workers()
    make([[1]], 4).team.close()
    assert workers() == before


def test_a_team_of_one_has_no_threads(make: Make) -> None:
    before = workers()
    phases = make([[5], [0], [7]], 1)
    phases.team.run(0, 3)
    assert workers() == before
    assert (phases.counts == phases.expected()).all()


def test_the_caller_may_change(make: Make) -> None:
    phases = make(some_sizes(5, 40), 2)
    for _ in range(20):
        thread = threading.Thread(target=phases.team.run, args=(0, 40))
        thread.start()
        thread.join()
    assert (phases.counts == phases.expected(20)).all()


def test_teams_run_beside_each_other(make: Make) -> None:
    teams = [make(some_sizes(seed, 100), 2, turns=50) for seed in (1, 2)]

    def work(phases: Phases) -> None:
        for _ in range(50):
            phases.team.run(0, 100)

    threads = [threading.Thread(target=work, args=(phases,)) for phases in teams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for phases in teams:
        assert (phases.counts == phases.expected(50)).all()
        assert not phases.wrong[0]


def test_other_python_threads_go_on_during_a_run(make: Make) -> None:
    phases = make([[4]] * 20, 2, turns=2_000_000)
    seen: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.append(time.perf_counter())
            time.sleep(0.001)

    looker = threading.Thread(target=look)
    looker.start()
    started = time.perf_counter()
    phases.team.run(0, 20)
    ended = time.perf_counter()
    over.set()
    looker.join()
    assert sum(started < moment < ended for moment in seen) >= 3


def wasting(milliseconds: float, stop: threading.Event, seed: int) -> None:
    """Takes a core at odd moments, without the interpreter's lock."""
    rng = random.Random(seed)
    sleep = ctypes.CDLL(None).usleep
    array = np.zeros(1 << 16)
    while not stop.is_set():
        until = time.perf_counter() + rng.uniform(0, milliseconds) / 1000
        while time.perf_counter() < until:
            np.sqrt(array, out=array)
        sleep(rng.randrange(500))


@pytest.mark.parametrize("patience", [0, 3, team_module.LOOKS])
def test_threads_that_are_put_aside_lose_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    # Without patience every wait is a sleep; with other threads about, cores are taken away in the
    # middle of units and between reading the shared word and changing it.
    monkeypatch.setattr(team_module, "LOOKS", patience)
    stop = threading.Event()
    others = [threading.Thread(target=wasting, args=(2, stop, seed)) for seed in range(3)]
    for other in others:
        other.start()
    try:
        for seed in range(6):
            rng = random.Random(seed)
            threads, turns, more = (
                rng.choice((2, 3, 4)),
                rng.choice((0, 300)),
                rng.choice((0, 5000)),
            )
            phases = make(some_sizes(seed, 60), threads, turns, more)
            whole = 0
            until = time.perf_counter() + 0.4
            while time.perf_counter() < until:
                phases.team.run(0, 60)
                whole += 1
                if rng.random() < 0.05:
                    time.sleep(rng.uniform(0, 0.003))
            assert (phases.counts == phases.expected(whole)).all()
            assert not phases.wrong[0]
            phases.team.close()
    finally:
        stop.set()
        for other in others:
            other.join()
