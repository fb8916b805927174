"""Blocks between pool and store under the real scheduler, on the fake runner that checks every one.

The store's thread is replaced by one that works when it is told to, so that every order of events
can be had again.
"""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.kv import store as store_module
from asyncllm.kv.block_pool import InvariantError
from asyncllm.kv.prefix import Chain
from asyncllm.kv.store import BlockStore
from asyncllm.kv.store_file import FileLayer, StoreFile
from asyncllm.kv.store_layout import Layout
from asyncllm.kv.store_thread import Job, ReadJob, perform
from asyncllm.scheduler import transfers as transfers_module
from asyncllm.scheduler.request import Request, State
from asyncllm.scheduler.scheduler import NoPlan
from asyncllm.scheduler.step import StepPlan
from asyncllm.scheduler.transfers import RETRY_AFTER
from tests.fake_runner import Engine
from tests.store_disks import MemoryDisk
from tests.test_scheduler_fuzz import FUZZ, Arrival, Setup, arrivals, live_through, setups, verify

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]  # 5 blocks and a token


class ToldThread:
    """Stands for `StoreThreads`: does its jobs when `work` is called."""

    def __init__(
        self,
        file: StoreFile,
        layout: Layout,
        fingerprint: bytes,
        slots: Sequence[memoryview],
        readers: int = 1,
    ) -> None:
        self.done: deque[Job] = deque()
        self.wake: Callable[[], object] = lambda: None
        self.waiting: list[Job] = []
        self.reads = 0
        self._things = (file, layout, fingerprint, slots)

    def put(self, job: Job) -> None:
        self.waiting.append(job)
        self.waiting.sort(key=lambda job: not isinstance(job, ReadJob))

    def work(self, jobs: int = 1 << 30) -> None:
        while self.waiting and jobs > 0:
            job, jobs = self.waiting.pop(0), jobs - 1
            self.reads += isinstance(job, ReadJob)
            try:
                perform(job, *self._things)
            except OSError as error:
                job.fault = error
            self.done.append(job)

    def close(self, patience_s: float) -> None:
        self.work()


class Stored:
    """Engines one after another over one disk."""

    def __init__(self, layer: FileLayer | None = None, *, extents: int = 64) -> None:
        self.disk = layer or MemoryDisk()
        self.extents = extents
        self.thread: ToldThread
        self.store: BlockStore

    def open(self, sizes: Sequence[int], slots: Sequence[memoryview]) -> BlockStore:
        block_tokens = sizes[0] // 16
        with mock.patch.object(store_module, "StoreThreads", ToldThread):
            self.store = BlockStore(
                Path("memory"),
                fingerprint=b"fake fingerprint",
                name="fake",
                block_tokens=block_tokens,
                extent_bytes=sizes,
                limit_bytes=Layout(block_tokens, tuple(sizes), self.extents).file_bytes,
                slots=slots,
                layer=self.disk,
            )
        thread = self.store._thread
        assert isinstance(thread, ToldThread)
        self.thread = thread
        return self.store

    def engine(self, *, work: Callable[[], int] = lambda: 1 << 30, **shape: Any) -> Engine:
        engine = Engine(store=self.open, **shape)
        engine.before_step = lambda: self.thread.work(work())
        return engine


def outputs(request: Request) -> list[list[int]]:
    return [sequence.output_ids for sequence in request.sequences]


def answered(engine: Engine, prompt: Sequence[int], **more: Any) -> Request:
    request = engine.request(prompt, **more)
    engine.run()
    verify(engine, request)
    return request


class TestAdoption:
    def test_a_finished_prompt_is_adopted_by_the_next_process(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        assert stored.store.written_blocks == 7, "28 of 29 tokens, whose last has no K/V"
        stored.store.close()
        engine = stored.engine()
        request = answered(engine, PROMPT)
        assert request.sequences[0].cached_tokens == 20
        assert sum(plan.prompt_rows for plan in engine.plans) == 1, "all but the tail is reused"
        assert stored.store.hit_blocks == 5
        assert engine.cache.prefix_hit_tokens == 20

    def test_while_one_adopts_the_others_go_on(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine(work=lambda: 0)
        other = engine.request([7, 7, 7], 30, end=-1, ignore_eos=True)
        for _ in range(3):
            engine.step()
        request = engine.request(PROMPT)
        before = len(other.sequences[0].output_ids)
        for _ in range(5):
            engine.step()
            engine.scheduler.check()
        assert request.sequences[0].state is State.ADOPTING
        assert len(other.sequences[0].output_ids) == before + 5
        stored.thread.work()
        engine.step()
        assert request.sequences[0].state is State.ADOPTING, "there are fewer slots than blocks"
        engine.before_step = stored.thread.work
        engine.run()
        assert request.sequences[0].cached_tokens == 20
        verify(engine, request)
        verify(engine, other)

    def test_others_wait_for_blocks_that_are_being_read_and_share_them(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine()
        requests = [engine.request([*PROMPT, n]) for n in range(1, 5)]
        engine.run()
        assert stored.store.hit_blocks == 5
        assert [r.sequences[0].cached_tokens for r in requests] == [20] * 4
        for request in requests:
            verify(engine, request)

    def test_a_cancelled_adoption_frees_its_blocks_at_once(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine(work=lambda: 0)
        request = engine.request(PROMPT)
        engine.step()
        assert engine.cache.blocks_used > 0
        engine.cancel(request)
        assert engine.cache.blocks_used == 0
        engine.scheduler.check()
        engine.before_step = stored.thread.work
        again = answered(engine, PROMPT)
        assert again.sequences[0].cached_tokens == 20
        assert len(stored.store._free_slots) == 4

    def test_blocks_read_but_not_loaded_are_nobodys_when_their_sequence_is_cancelled(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine(work=lambda: 0)
        request = engine.request(PROMPT)
        engine.step()
        stored.thread.work()
        engine.scheduler._end_adoptions(engine.scheduler.transfers)  # type: ignore[arg-type]
        engine.cancel(request)
        assert engine.cache.blocks_cached == 0
        engine.before_step = stored.thread.work
        assert answered(engine, PROMPT).sequences[0].cached_tokens == 20
        assert len(stored.store._free_slots) == 4

    def test_nothing_is_loaded_for_a_sequence_that_is_preempted_before_it_runs(self) -> None:
        """Its blocks were read, and the same plan takes them away from it."""
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine(work=lambda: 0, capacity=(8,), max_seqs=2, slots=16)
        older = engine.request([7, 7, 7], 20, end=-1, ignore_eos=True)
        engine.step()
        request = engine.request(PROMPT)
        states = []
        while older.sequences[0].submitted < 8:  # then it needs a third block
            engine.step()
        states.append(request.sequences[0].state)
        stored.thread.work()
        plan = engine.step()
        states.append(request.sequences[0].state)
        assert states == [State.ADOPTING, State.PREEMPTED]
        assert isinstance(plan, StepPlan) and not plan.loads
        engine.scheduler.check()
        engine.before_step = stored.thread.work
        engine.run()
        for each in (older, request):
            verify(engine, each)
        assert len(stored.store._free_slots) == 16

    def test_nothing_is_forked_from_blocks_that_are_only_about_to_be_loaded(self) -> None:
        """A plan copies before it loads."""
        stored = Stored()
        engine = stored.engine(capacity=(8,), max_seqs=2, slots=16)
        older = engine.request([7, 7, 7], 28, end=-1, ignore_eos=True)
        engine.step()
        request = engine.request([5] * 7, 20, n=2, end=-1, ignore_eos=True)
        first, second = request.sequences
        while first.state is not State.PREEMPTED:
            engine.step()
        assert first.length > 12, "more than the prompt is stored"
        while not older.done:
            engine.step()
        while second.state is State.WAITING:
            engine.step()
        assert stored.store.hit_blocks > 1
        assert engine.runner.copies == 1, "the second forked the first"
        engine.run()
        verify(engine, request)

    @pytest.mark.parametrize("bad", range(5))
    def test_a_bad_block_shortens_the_prefix(self, bad: int) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        assert isinstance(stored.disk, MemoryDisk)
        layout = Layout(4, (64,), 64)
        engine = stored.engine()
        stem = _chain(engine, PROMPT)
        extent = stored.store._indexes[0].get(stem[bad].key)
        assert extent is not None
        stored.disk.content[layout.extent_offset(0, extent.extent) + 9] ^= 4
        request = answered(engine, PROMPT)
        assert request.sequences[0].cached_tokens == 4 * bad
        assert stored.store.rejected_blocks == 1
        assert (engine.scheduler.admitted, engine.scheduler.resumed) == (1, 0)

    def test_a_windowed_group_needs_its_window_and_no_more(self) -> None:
        stored = Stored(extents=200)
        shape: dict[str, Any] = {"windows": (None, 6), "capacity": (64, 64)}
        answered(stored.engine(**shape), PROMPT)
        stored.store.close()
        engine = stored.engine(**shape)
        request = answered(engine, PROMPT)
        assert request.sequences[0].cached_tokens == 20
        assert stored.store.hit_blocks == 5 + 2
        stored.store.close()

        engine = stored.engine(**shape)
        stem = _chain(engine, PROMPT)
        stored.store._indexes[1].remove(stem[4].key)
        match = engine.cache.match(stem, 20, stored.store.has)
        assert match.tokens == 16
        assert match.shortened == "blocks within a window before token 20 are gone"
        request = answered(engine, PROMPT)
        assert request.sequences[0].cached_tokens == 16

    def test_a_preempted_sequence_adopts_what_it_stored(self) -> None:
        stored = Stored()
        engine = stored.engine(capacity=(12,), max_seqs=2, block_tokens=4)
        requests = [engine.request([n] * 14, 20, end=-1, ignore_eos=True, seed=n) for n in (1, 2)]
        engine.run()
        for request in requests:
            verify(engine, request)
        assert engine.scheduler.preempted > 0
        assert engine.scheduler.resumed == engine.scheduler.preempted
        assert stored.store.hit_blocks > 0

    def test_prefix_cache_off_reads_and_writes_nothing(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        written = stored.store.written_blocks
        stored.store.close()
        engine = stored.engine()
        assert answered(engine, PROMPT, prefix_cache=False).sequences[0].cached_tokens == 0
        answered(engine, [9, 9, 9, 9, 9, 9, 9], prefix_cache=False)
        assert (stored.store.hit_blocks, stored.store.written_blocks) == (0, 0)
        assert stored.store.blocks == written

    def test_salts_do_not_share(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT, salt=b"one")
        stored.store.close()
        engine = stored.engine()
        assert answered(engine, PROMPT).sequences[0].cached_tokens == 0
        assert answered(engine, PROMPT, salt=b"two").sequences[0].cached_tokens == 0
        assert answered(engine, PROMPT, salt=b"one").sequences[0].cached_tokens == 20

    def test_several_outputs_share_what_one_adopts(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine()
        request = answered(engine, PROMPT, n=3)
        assert stored.store.hit_blocks == 5
        assert len(set(map(tuple, outputs(request)))) > 1

    def test_it_reads_only_when_that_is_faster(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine(seconds=lambda plan: 1e-6)
        answered(engine, [2, 2, 2, 2, 2, 2])  # a million tokens a second and more
        transfers = engine.scheduler.transfers
        assert transfers is not None
        transfers.bytes_per_s = 1000.0
        match = transfers.match(engine.cache, _chain(engine, PROMPT), 20)
        assert (match.tokens, match.shortened) == (
            0,
            "computing 20 tokens is faster than reading them",
        )
        assert answered(engine, PROMPT).sequences[0].cached_tokens == 0
        assert stored.store.hit_blocks == 0
        other = _chain(stored.engine(), PROMPT)  # of a file that has all, in a pool without any
        engine = stored.engine(seconds=lambda plan: 1e-6)
        answered(engine, [2, 2, 2])
        transfers = engine.scheduler.transfers
        assert transfers is not None
        transfers.bytes_per_s = 1000.0
        hits = [transfers.match(engine.cache, other, 20).tokens for _ in range(RETRY_AFTER)]
        assert hits == [0] * (RETRY_AFTER - 1) + [20], "tried all the same now and then"
        transfers.bytes_per_s = 1e12
        assert transfers.match(engine.cache, other, 20).tokens == 20

    def test_a_disk_that_does_not_answer_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transfers_module, "PATIENCE_S", 0.0)
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine(work=lambda: 0)
        request = answered(engine, PROMPT)
        assert request.sequences[0].cached_tokens == 0
        assert engine.scheduler.admitted == 1

    def test_the_check_finds_an_adoption_that_nobody_waits_for(self) -> None:
        stored = Stored()
        answered(stored.engine(), PROMPT)
        stored.store.close()
        engine = stored.engine(work=lambda: 0)
        request = engine.request(PROMPT)
        engine.step()
        engine.scheduler.check()
        request.sequences[0].state = State.PREFILLING
        with pytest.raises(InvariantError, match="are waited for"):
            engine.scheduler.check()


def _chain(engine: Engine, tokens: Sequence[int]) -> Chain:
    chain = engine.cache.chain(b"")
    chain.reach(lambda start, stop: tokens[start:stop], len(tokens) // 4)
    return chain


class TestSaving:
    def test_an_idle_engine_saves_what_is_left(self) -> None:
        stored = Stored()
        engine = stored.engine()
        engine.request(PROMPT, 1)
        engine.run()
        assert stored.store.written_blocks == 5
        assert engine.step() is NoPlan.IDLE

    def test_the_beginning_of_a_prefix_is_saved_before_its_end(self) -> None:
        stored = Stored()
        engine = stored.engine(work=lambda: 0)
        engine.request(PROMPT, 1)
        for _ in range(6):
            engine.step()
        stored.thread.work()
        engine.scheduler.plan()
        chain = _chain(engine, PROMPT)
        assert [stored.store.has(0, chain[n]) for n in range(5)] == [True, True, *[False] * 3]

    def test_what_is_evicted_with_all_slots_taken_is_dropped_and_counted(self) -> None:
        stored = Stored()
        engine = stored.engine(work=lambda: 0, capacity=(7,))
        engine.request(PROMPT, 1)
        for _ in range(6):
            engine.step()
        engine.request([8] * 20, 1)
        for _ in range(4):
            engine.step()
        assert stored.store.dropped_blocks > 0
        engine.before_step = stored.thread.work
        engine.run()
        for request in engine.requests:
            verify(engine, request)

    def test_a_full_disk_fails_no_request(self) -> None:
        class Full(MemoryDisk):
            def write(self, fd: int, data: memoryview, offset: int) -> int:
                if len(data) == 64:  # the block, not its header
                    raise OSError(errno.ENOSPC, "no space left")
                return super().write(fd, data, offset)

        stored = Stored(Full())
        engine = stored.engine()
        for prompt in (PROMPT, PROMPT[3:], PROMPT):
            answered(engine, prompt)
        assert stored.store.faults > 0
        assert stored.store.written_blocks == 0
        assert not engine.scheduler.has_work


def damaged(disk: MemoryDisk, rng: random.Random) -> None:
    """Flip some bits, none in the superblock: the same model's store is to be opened again."""
    for _ in range(rng.randint(0, 20)):
        disk.content[rng.randrange(4 * 4096, len(disk.content))] ^= 1 << rng.randrange(8)


@settings(FUZZ, max_examples=200)
@given(
    setups(refusing=True),
    st.lists(arrivals(cancels=True), min_size=2, max_size=10),
    st.booleans(),
    st.integers(0, 1 << 30),
    st.integers(1, 40),
)
def test_tokens_are_those_of_an_engine_without_a_store(
    setup: Setup, script: list[Arrival], ahead: bool, seed: int, extents: int
) -> None:
    """Cold, then after a restart over what is left of a damaged file."""
    rng = random.Random(seed)
    stored = Stored(extents=extents)
    shape = replace(setup, prefix_cache=True)
    for _ in range(2):
        engine = stored.engine(
            work=lambda: rng.choice([0, 1, 1, 3, 100]),
            windows=shape.windows,
            capacity=shape.capacity,
            block_tokens=shape.block_tokens,
            chunk=shape.chunk,
            max_seqs=shape.max_seqs,
            context_length=shape.context_length,
            grants=shape.grants,
            ahead=ahead,
            slots=rng.choice([2, 4, 16]),
        )
        for request in live_through(engine, script):
            verify(engine, request, refusing=setup.grants is not None)
        store = stored.store
        store.poll()
        assert len(store._free_slots) == len(engine.runner.slots), "a slot is lost"
        store.close()
        assert isinstance(stored.disk, MemoryDisk)
        damaged(stored.disk, rng)
