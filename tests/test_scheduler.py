"""The scheduler on a runner without a model that verifies the cache."""

from __future__ import annotations

import logging
from itertools import count

import pytest

from asyncllm.errors import PromptTooLongError, RequestError
from asyncllm.kv import prefix as prefix_module
from asyncllm.kv.block_pool import InvariantError
from asyncllm.scheduler.chunking import ChunkPolicy
from asyncllm.scheduler.request import Request, State
from asyncllm.scheduler.scheduler import NoPlan
from asyncllm.scheduler.step import DecodeMode, Row, RowResult, StepPlan, StepResult, is_decode
from tests.fake_runner import Engine, next_token

BOTH_ORDERS = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])


def prompt(tokens: int, start: int = 1) -> list[int]:
    return [(start * 7 + i) % 49 + 1 for i in range(tokens)]


def step(engine: Engine) -> StepPlan:
    plan = engine.step()
    assert isinstance(plan, StepPlan)
    return plan


def rows_of(plan: StepPlan, request: Request) -> list[Row]:
    ids = {sequence.sequence_id for sequence in request.sequences}
    return [row for row in plan.rows if row.sequence_id in ids]


def output(request: Request, index: int = 0) -> list[int]:
    return request.sequences[index].output_ids


class TestAdmission:
    def test_a_request_waits_until_its_prompt_and_a_block_of_headroom_fit(self) -> None:
        engine = Engine(capacity=[8], chunk=64)
        first = engine.request(prompt(12), 20, ignore_eos=True)  # 3 blocks, grows to 8
        second = engine.request(prompt(16, 2), 8, ignore_eos=True)  # 4 blocks and 1: exactly fits
        step(engine)
        assert engine.scheduler.running == 2
        engine.run()
        assert output(first) == engine.expected(first.sequences[0], 20)
        assert output(second) == engine.expected(second.sequences[0], 8)
        tight = Engine(capacity=[8], chunk=64)
        tight.request(prompt(13), 19, ignore_eos=True)  # 4 blocks: 4 are left, 5 are needed
        tight.request(prompt(16, 2), 8, ignore_eos=True)
        step(tight)
        assert (tight.scheduler.running, tight.scheduler.waiting) == (1, 1)
        assert tight.run() > 0

    def test_nobody_is_skipped_for_a_smaller_one(self) -> None:
        engine = Engine(capacity=[8])
        engine.request(prompt(8), 4)
        large = engine.request(prompt(28, 2), 4)
        small = engine.request(prompt(2, 3), 4)
        step(engine)
        assert large.sequences[0].state is small.sequences[0].state is State.WAITING
        assert engine.scheduler.waiting == 2

    @BOTH_ORDERS
    def test_blocks_freed_by_a_commit_admit_the_next_in_the_plan_right_after(
        self, ahead: bool
    ) -> None:
        engine = Engine(capacity=[4], ahead=ahead)
        first = engine.request(prompt(10), 3, ignore_eos=True)
        second = engine.request(prompt(10, 2), 3, ignore_eos=True)
        while not first.done:
            engine.step()
            assert second.sequences[0].state is State.WAITING
        assert rows_of(step(engine), second)

    def test_no_more_sequences_run_than_allowed(self) -> None:
        engine = Engine(max_seqs=2)
        for i in range(5):
            engine.request(prompt(5, i), 5)
        while engine.scheduler.has_work:
            step(engine)
            assert engine.scheduler.running <= 2

    def test_lower_priority_values_go_first_then_arrival_decides(self) -> None:
        engine = Engine(max_seqs=1)
        later, first, second = (
            engine.request(prompt(3, i), 1, priority=priority)
            for i, priority in enumerate([1, 0, 0])
        )
        engine.run()
        order = [plan.rows[0].sequence_id for plan in engine.plans]
        assert order == [r.sequences[0].sequence_id for r in (first, second, later)]

    def test_a_prompt_without_room_in_the_context_is_refused_with_the_numbers(self) -> None:
        engine = Engine(context_length=32)
        message = "the prompt has 32 tokens; context_length=32 leaves room for 31"
        with pytest.raises(PromptTooLongError, match=message):
            engine.request(prompt(32))
        assert not engine.scheduler.has_work
        assert engine.scheduler.waiting == 0
        fits = engine.request(prompt(31), None, ignore_eos=True)
        engine.run()
        assert len(output(fits)) == 1
        assert fits.sequences[0].finish_reason == "length"

    def test_a_prompt_that_can_never_fit_the_pool_is_refused_and_the_next_one_runs(self) -> None:
        engine = Engine(capacity=[8], block_tokens=16)
        with pytest.raises(PromptTooLongError, match=r"200 tokens.* 13 blocks of 16.* hold 8"):
            engine.request(prompt(200))
        request = engine.request(prompt(100), 5, ignore_eos=True)
        engine.run()
        assert output(request) == engine.expected(request.sequences[0], 5)

    @BOTH_ORDERS
    def test_one_that_fits_but_cannot_finish_ends_with_length(self, ahead: bool) -> None:
        engine = Engine(capacity=[8], block_tokens=16, chunk=32, ahead=ahead)
        request = engine.request(prompt(100), None, ignore_eos=True)
        engine.run()
        assert request.sequences[0].finish_reason == "length"
        assert output(request) == engine.expected(request.sequences[0], 8 * 16 + 1 - 100)

    def test_a_prompt_that_fills_the_whole_pool_gives_one_token(self) -> None:
        engine = Engine(capacity=[8])
        request = engine.request(prompt(32), None, ignore_eos=True)
        engine.run()
        assert len(output(request)) == 1

    def test_more_outputs_than_may_run_and_empty_prompts_are_refused(self) -> None:
        engine = Engine(max_seqs=3)
        with pytest.raises(RequestError, match="n=4: accepted is 1 to max_seqs=3"):
            engine.request(prompt(3), n=4)
        with pytest.raises(RequestError, match="no tokens"):
            engine.request([])
        assert not engine.scheduler.has_work

    def test_the_context_bounds_prompt_and_output_together(self) -> None:
        engine = Engine(context_length=20)
        request = engine.request(prompt(5), 1000, ignore_eos=True)
        engine.run()
        assert len(output(request)) == 15
        assert request.sequences[0].finish_reason == "length"


class TestChunks:
    def test_prompt_rows_of_all_requests_share_one_chunk_oldest_first(self) -> None:
        engine = Engine(chunk=10)
        first = engine.request(prompt(14), 4)
        second = engine.request(prompt(4, 2), 4)
        third = engine.request(prompt(9, 3), 4)
        counts = [
            [sum(row.count for row in rows_of(plan, r)) for r in (first, second, third)]
            for plan in (step(engine), step(engine), step(engine))
        ]
        assert counts == [[10, 0, 0], [4, 4, 2], [1, 1, 7]]

    def test_a_higher_priority_prompt_goes_before_an_older_one(self) -> None:
        engine = Engine(chunk=8)
        engine.request(prompt(20), 4)
        step(engine)
        urgent = engine.request(prompt(8, 2), 4, priority=-1)
        assert rows_of(step(engine), urgent)[0].count == 8

    @BOTH_ORDERS
    def test_every_decode_advances_while_prompts_arrive_without_end(self, ahead: bool) -> None:
        engine = Engine(chunk=8, capacity=[400], max_seqs=6, ahead=ahead)
        decoding = [engine.request(prompt(4, i), 60, ignore_eos=True) for i in range(3)]
        while any(r.sequences[0].state is not State.DECODING for r in decoding):
            engine.step()
        steps = 0
        while not all(r.done for r in decoding):
            engine.request(prompt(40, 5 + steps), 2)
            engine.step()
            steps += 1
        assert steps <= 62

    @BOTH_ORDERS
    def test_a_long_prompt_gets_its_first_token_while_decodes_never_end(self, ahead: bool) -> None:
        engine = Engine(chunk=8, capacity=[400], max_seqs=4, ahead=ahead)
        endless = [engine.request(prompt(4, i), None, ignore_eos=True) for i in range(3)]
        for _ in range(5):
            engine.step()
        long = engine.request(prompt(80, 9), 5)
        for _ in range(80 // 8 + 2):
            engine.step()
        assert output(long)
        assert not any(r.done for r in endless)

    def test_the_pause_budget_shrinks_chunks_only_while_something_decodes(self) -> None:
        def seconds(plan: StepPlan) -> float:
            return 0.002 * plan.prompt_rows + 0.01

        policy = ChunkPolicy("auto", 100)
        engine = Engine(policy=policy, capacity=[4000], seconds=seconds)
        engine.request(prompt(1000), None, ignore_eos=True)
        assert step(engine).prompt_rows >= 32
        while engine.scheduler.prefilling:
            step(engine)
        engine.request(prompt(1000, 3), 1)
        sizes = []
        while engine.scheduler.prefilling or engine.scheduler.waiting:
            sizes.append(step(engine).prompt_rows)
        assert all(0.01 + 0.002 * size <= 0.1 for size in sizes)
        assert max(sizes) >= 32


class TestPrefixReuse:
    @BOTH_ORDERS
    def test_exactly_k_blocks_twice_then_one_block_longer(self, ahead: bool) -> None:
        engine = Engine(ahead=ahead)
        hits = []
        for tokens in (12, 12, 16):
            request = engine.request(prompt(tokens), 3, ignore_eos=True)
            engine.run()
            assert output(request) == engine.expected(request.sequences[0], 3)
            hits.append(request.sequences[0].cached_tokens)
        assert hits == [0, 8, 12]
        assert engine.cache.prefix_hit_tokens == 20

    def test_hits_are_really_not_computed(self) -> None:
        engine = Engine(chunk=64)
        engine.request(prompt(20), 1)
        engine.run()
        again = engine.request(prompt(20), 1)
        assert [(row.offset, row.count) for row in rows_of(step(engine), again)] == [(16, 4)]

    @BOTH_ORDERS
    def test_a_conversation_reuses_its_answer_too(self, ahead: bool) -> None:
        engine = Engine(windows=(None, 6), capacity=(64, 64), ahead=ahead)
        first = engine.request(prompt(10), 9, ignore_eos=True)
        engine.run()
        follow = engine.request([*prompt(10), *output(first), 5, 6, 7], 4)
        engine.run()
        assert follow.sequences[0].cached_tokens == 16  # 18 of the 19 tokens were computed

    def test_salts_keep_requests_apart(self) -> None:
        engine = Engine()
        hits = []
        for salt in (b"", b"a", b"b", b"a"):
            request = engine.request(prompt(12), 1, salt=salt)
            engine.run()
            hits.append(request.sequences[0].cached_tokens)
        assert hits == [0, 0, 0, 8]

    def test_a_request_without_prefix_cache_reads_and_leaves_nothing(self) -> None:
        engine = Engine()
        engine.request(prompt(12), 1, prefix_cache=False)
        engine.run()
        assert engine.cache.blocks_cached == 0
        engine.request(prompt(12), 1)
        engine.run()
        private = engine.request(prompt(12), 1, prefix_cache=False)
        engine.run()
        assert private.sequences[0].cached_tokens == engine.cache.prefix_hit_tokens == 0

    def test_a_cache_without_prefix_reuse_keeps_nothing(self) -> None:
        engine = Engine(prefix_cache=False)
        for _ in range(2):
            request = engine.request(prompt(12), 1)
            engine.run()
        assert engine.cache.blocks_cached == request.sequences[0].cached_tokens == 0

    def test_blocks_of_running_sequences_are_shared(self) -> None:
        engine = Engine(chunk=64)
        first = engine.request(prompt(16), 50, ignore_eos=True)
        step(engine)
        used = engine.cache.blocks_used
        second = engine.request(prompt(18), 50, ignore_eos=True)
        plan = step(engine)
        (mine,), (theirs,) = rows_of(plan, first), rows_of(plan, second)
        assert mine.block_tables[0][:4] == theirs.block_tables[0][:4]
        assert second.sequences[0].cached_tokens == 16
        assert engine.cache.blocks_used == used + 2  # one for each that goes on
        engine.cancel(first)
        engine.run()
        assert output(second) == engine.expected(second.sequences[0], 50)

    def test_a_cancelled_prompt_leaves_only_what_was_committed(self) -> None:
        engine = Engine(chunk=8, ahead=True)
        first = engine.request(prompt(30), 5)
        engine.step()
        engine.step()  # 16 tokens submitted, 8 committed
        engine.cancel(first)
        second = engine.request(prompt(30), 5)
        engine.run()
        assert second.sequences[0].cached_tokens == 8
        assert output(second) == engine.expected(second.sequences[0], 5)

    def test_a_key_collision_is_a_miss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = prefix_module.digest
        monkeypatch.setattr(prefix_module, "digest", lambda data, seed: honest(data[:16], seed))
        engine = Engine()  # now every block after the same parent has the same key
        first = engine.request(prompt(12), 4, ignore_eos=True)
        engine.run()
        other = engine.request(prompt(12, 2), 4, ignore_eos=True)
        engine.run()
        same = engine.request(prompt(12), 4, ignore_eos=True)
        engine.run()
        assert other.sequences[0].cached_tokens == 0
        assert same.sequences[0].cached_tokens == 8
        for request in (first, other, same):
            assert output(request) == engine.expected(request.sequences[0], 4)

    def test_reuse_makes_room_for_what_is_needed_now(self) -> None:
        engine = Engine(capacity=[8])
        for i in range(6):
            request = engine.request(prompt(20, i), 6, ignore_eos=True)
            engine.run()
            assert output(request) == engine.expected(request.sequences[0], 6)
        assert engine.cache.blocks_total == 8


class TestPromptScores:
    def scores(self, engine: Engine, request: Request) -> list[int]:
        return [
            score.token_id
            for emission in engine.emissions
            if emission.sequence.request is request
            for score in emission.prompt_logprobs
        ]

    def test_the_whole_prompt_is_computed_whatever_is_cached(self) -> None:
        engine = Engine(chunk=8)
        engine.request(prompt(20), 1)
        engine.run()
        request = engine.request(prompt(20), 3, prompt_logprobs=0)
        engine.run()
        assert request.sequences[0].cached_tokens == 0
        assert self.scores(engine, request) == prompt(20)[1:]

    def test_several_outputs_and_preemption_give_each_score_once(self) -> None:
        engine = Engine(chunk=6, capacity=[12], max_seqs=4)
        older = engine.request(prompt(8, 5), 36, ignore_eos=True)
        request = engine.request(prompt(20), 12, prompt_logprobs=1, n=2, ignore_eos=True)
        engine.run()
        assert engine.scheduler.preempted > 0
        assert self.scores(engine, request) == prompt(20)[1:]
        assert len(output(older)) == 36

    def test_a_prompt_preempted_halfway_gives_each_score_once(self) -> None:
        engine = Engine(chunk=2, capacity=[9])
        older = engine.request(prompt(3, 5), 25, ignore_eos=True)
        step(engine)
        request = engine.request(prompt(24), 4, prompt_logprobs=1)
        while not engine.scheduler.preempted:
            step(engine)
        assert 0 < len(self.scores(engine, request)) < 23
        engine.run()
        assert self.scores(engine, request) == prompt(24)[1:]
        assert older.done


class TestSeveralOutputs:
    @BOTH_ORDERS
    @pytest.mark.parametrize("tokens", [1, 2, 12, 13, 14])
    @pytest.mark.parametrize("reuse", [True, False])
    def test_they_share_the_prompt_and_compute_only_its_last_token(
        self, tokens: int, reuse: bool, ahead: bool
    ) -> None:
        engine = Engine(chunk=64, ahead=ahead, prefix_cache=reuse)
        request = engine.request(prompt(tokens), 9, n=3, ignore_eos=True)
        engine.run()
        rows = [row for plan in engine.plans for row in plan.rows if row.output_count == 0]
        assert [(row.offset, row.count) for row in rows] == [
            (0, tokens),
            (tokens - 1, 1),
            (tokens - 1, 1),
        ]
        for sequence in request.sequences:
            assert sequence.output_ids == engine.expected(sequence, 9)
        assert len({tuple(sequence.output_ids) for sequence in request.sequences}) == 3
        assert [s.cached_tokens for s in request.sequences] == [0, tokens - 1, tokens - 1]

    def test_an_unfinished_block_is_copied_and_full_ones_are_shared(self) -> None:
        engine = Engine(chunk=64)
        request = engine.request(prompt(14), 9, n=2, ignore_eos=True)
        step(engine)
        plan = step(engine)
        first, second = (row.block_tables[0] for row in rows_of(plan, request))
        assert first[:3] == second[:3]
        (copy,) = plan.copies
        assert (copy.source, copy.target) == (first[3], second[3])

    def test_siblings_wait_at_the_head_of_the_queue_until_the_prompt_is_computed(self) -> None:
        engine = Engine(chunk=4)
        request = engine.request(prompt(12), 9, n=2)
        behind = engine.request(prompt(2, 3), 2)
        for _ in range(3):
            step(engine)
            assert request.sequences[1].state is State.WAITING
            assert behind.sequences[0].state is State.WAITING
        step(engine)
        assert request.sequences[1].is_running or request.sequences[1].ended
        assert behind.sequences[0].is_running or behind.done

    def test_when_the_first_is_gone_the_others_look_the_prefix_up(self) -> None:
        engine = Engine(chunk=64)
        request = engine.request(prompt(14), 1, n=3)
        engine.run()
        assert [s.cached_tokens for s in request.sequences] == [0, 12, 12]
        for sequence in request.sequences:
            assert sequence.output_ids == engine.expected(sequence, 1)

    @BOTH_ORDERS
    def test_windows_that_moved_on_do_not_spoil_a_late_fork(self, ahead: bool) -> None:
        engine = Engine(
            windows=(None, 5), capacity=(60, 8), chunk=8, ahead=ahead, prefix_cache=False
        )
        filler = engine.request(prompt(8, 4), 16, ignore_eos=True)  # holds one of two rings
        request = engine.request(prompt(14), 40, n=2, ignore_eos=True)
        engine.run()
        for sequence in (*request.sequences, *filler.sequences):
            assert sequence.output_ids == engine.expected(sequence, len(sequence.output_ids))
        assert request.sequences[1].cached_tokens == 0

    def test_cancelling_frees_all_of_them(self) -> None:
        engine = Engine()
        request = engine.request(prompt(14), 30, n=4, ignore_eos=True)
        for _ in range(3):
            step(engine)
        assert engine.scheduler.running == 4
        assert engine.cancel(request) == list(request.sequences)
        assert engine.cache.blocks_used == 0
        assert engine.scheduler.cancelled == 4
        engine.scheduler.check()


class TestPreemption:
    @BOTH_ORDERS
    def test_tokens_are_those_of_a_run_without_it(self, ahead: bool) -> None:
        engine = Engine(capacity=[14], chunk=8, ahead=ahead, max_seqs=8)
        requests = [engine.request(prompt(6, i), 24, ignore_eos=True) for i in range(8)]
        engine.run()
        assert engine.scheduler.preempted > 3
        assert engine.scheduler.resumed == engine.scheduler.preempted
        for request in requests:
            assert output(request) == engine.expected(request.sequences[0], 24)
        emitted = [e.token for e in engine.emissions if e.sequence.request is requests[-1]]
        assert emitted == output(requests[-1]), "no token is lost or doubled"

    def test_the_youngest_yields_even_if_it_is_the_one_that_asks(self) -> None:
        engine = Engine(capacity=[5], chunk=16)
        old = engine.request(prompt(6), 14, ignore_eos=True)
        young = engine.request(prompt(7, 2), 13, ignore_eos=True)
        while not engine.scheduler.preempted:
            step(engine)
        assert young.sequences[0].state is State.PREEMPTED
        assert young.sequences[0].epoch == 1
        assert old.sequences[0].is_running
        engine.run()
        assert old.sequences[0].epoch == 0

    def test_a_lower_priority_yields_before_a_younger_one(self) -> None:
        engine = Engine(capacity=[7], chunk=16)
        low = engine.request(prompt(6), 14, priority=1, ignore_eos=True)
        high = engine.request(prompt(6, 2), 14, ignore_eos=True)
        while not engine.scheduler.preempted:
            step(engine)
        assert low.sequences[0].state is State.PREEMPTED
        engine.run()
        assert high.sequences[0].epoch == 0

    def test_the_preempted_resume_in_the_order_of_preemption_ahead_of_new_requests(self) -> None:
        engine = Engine(capacity=[12], chunk=64, max_seqs=4)
        old, second, third = (engine.request(prompt(9, i), 30, ignore_eos=True) for i in range(3))
        while second.sequences[0].state is not State.PREEMPTED:
            step(engine)
        assert third.sequences[0].state is State.PREEMPTED
        first_out, then_out = sorted((second, third), key=lambda r: r.sequences[0].queue_key)
        new = engine.request(prompt(1, 7), 1)
        order: list[Request] = []
        while engine.scheduler.has_work:
            waiting = [r for r in (first_out, then_out, new) if r not in order]
            step(engine)
            order += [r for r in waiting if r.sequences[0].is_running or r.done]
        assert order == [first_out, then_out, new]
        assert old.sequences[0].epoch == 0

    def test_resuming_reuses_what_is_still_cached(self) -> None:
        engine = Engine(capacity=[10], chunk=64)
        engine.request(prompt(12), 20, ignore_eos=True)
        engine.request(prompt(12, 2), 20, ignore_eos=True)
        while not engine.scheduler.resumed:
            step(engine)
        assert engine.cache.prefix_hit_tokens > 0

    @BOTH_ORDERS
    def test_memory_that_is_not_granted_leads_to_preemption_not_to_failure(
        self, ahead: bool
    ) -> None:
        engine = Engine(capacity=[1000], grants=[20], chunk=16, ahead=ahead)
        requests = [engine.request(prompt(10, i), 40, ignore_eos=True) for i in range(4)]
        engine.run()
        assert engine.scheduler.preempted > 0
        for request in requests:
            assert output(request) == engine.expected(request.sequences[0], 40)

    @BOTH_ORDERS
    def test_one_alone_ends_with_length_where_memory_ends(self, ahead: bool) -> None:
        engine = Engine(capacity=[1000], grants=[20], chunk=16, ahead=ahead)
        request = engine.request(prompt(10), 1000, ignore_eos=True)
        engine.run()
        assert request.sequences[0].finish_reason == "length"
        assert output(request) == engine.expected(request.sequences[0], 80 + 1 - 10)
        ends = [e for e in engine.emissions if e.finished]
        assert [(e.sequence, e.token) for e in ends] == [(request.sequences[0], None)]

    @BOTH_ORDERS
    def test_a_prompt_for_which_memory_is_not_granted_fails_with_the_numbers(
        self, ahead: bool
    ) -> None:
        engine = Engine(capacity=[1000], grants=[20], chunk=16, ahead=ahead)
        request = engine.request(prompt(100), 5)
        small = engine.request(prompt(10), 5, ignore_eos=True)
        engine.run()
        error = request.sequences[0].error
        assert isinstance(error, PromptTooLongError)
        assert "100 tokens, which need 25 blocks of 4 tokens; the K/V pool can hold 20" in str(
            error
        )
        assert request.sequences[0].state is State.FAILED
        assert len(output(small)) == 5

    @BOTH_ORDERS
    def test_memory_that_was_refused_is_asked_for_again_before_anything_is_given_up(
        self, ahead: bool
    ) -> None:
        engine = Engine(capacity=[1000], grants=[20], chunk=16, ahead=ahead)
        request = engine.request(prompt(70), 100, ignore_eos=True)
        while engine.cache.blocks_total < 20:
            engine.step()
        engine.runner.memory[0] = 10  # someone else gave it back
        while len(output(request)) < 40:
            engine.step()
        engine.cancel(request)
        assert engine.cache.blocks_total == 30
        engine.runner.memory[0] = 100
        large = engine.request(prompt(200, 2), 5, ignore_eos=True)
        engine.run()
        assert output(large) == engine.expected(large.sequences[0], 5)

    def test_a_preempted_one_that_no_longer_fits_ends_with_length(self) -> None:
        engine = Engine(capacity=[1000], grants=[20], chunk=64)
        request = engine.request(prompt(40), 1000, ignore_eos=True)
        for _ in range(10):
            step(engine)
        engine.scheduler._preempt(request.sequences[0])
        pool = engine.cache.pools[0]
        lost = [pool.take() for _ in range(15)]
        engine.step()
        assert request.sequences[0].finish_reason == "length"
        assert len(output(request)) == 10
        for block in lost:
            pool.release(block)
        engine.scheduler.check()


class TestCancel:
    @BOTH_ORDERS
    def test_a_waiting_request_never_touches_the_device(self, ahead: bool) -> None:
        engine = Engine(max_seqs=1, ahead=ahead)
        engine.request(prompt(5), 5)
        waiting = engine.request(prompt(5, 2), 5)
        engine.step()
        assert engine.cancel(waiting) == list(waiting.sequences)
        assert engine.scheduler.waiting == 0
        engine.run()
        assert not any(rows_of(plan, waiting) for plan in engine.plans)
        assert all(waiting.sequences[0].sequence_id not in plan.released for plan in engine.plans)

    @BOTH_ORDERS
    @pytest.mark.parametrize("after", range(1, 9))
    def test_blocks_are_free_at_once_in_every_state(self, after: int, ahead: bool) -> None:
        engine = Engine(chunk=4, ahead=ahead, windows=(None, 5), capacity=(30, 30))
        other = engine.request(prompt(6, 3), 30, ignore_eos=True)
        for _ in range(4):
            engine.step()
        used = engine.cache.blocks_used
        request = engine.request(prompt(14), 4, ignore_eos=True)
        for _ in range(after):
            engine.step()
        if not request.done:
            assert engine.cancel(request) == list(request.sequences)
            assert request.sequences[0].finish_reason == "cancelled"
            assert request.sequences[0].state is State.CANCELLED
        assert engine.cache.blocks_used <= used + 5, "the other one's growth is all"
        engine.scheduler.check()
        assert engine.cancel(request) == []
        engine.run()
        assert output(other) == engine.expected(other.sequences[0], 30)

    def test_a_preempted_request_can_be_cancelled(self) -> None:
        engine = Engine(capacity=[5], chunk=16)
        engine.request(prompt(6), 14, ignore_eos=True)
        young = engine.request(prompt(7, 2), 13, ignore_eos=True)
        while not engine.scheduler.preempted:
            step(engine)
        engine.cancel(young)
        engine.run()
        assert engine.scheduler.resumed == 0

    def test_the_result_of_a_step_in_flight_is_dropped(self) -> None:
        engine = Engine(ahead=True)
        request = engine.request(prompt(5), 9, ignore_eos=True)
        for _ in range(3):
            engine.step()
        before = len(output(request))
        engine.cancel(request)
        engine.step()
        assert len(output(request)) == before
        assert not engine.scheduler.has_work

    def test_the_runner_is_told_which_sequences_ended(self) -> None:
        engine = Engine()
        request = engine.request(prompt(5), 9, ignore_eos=True)
        step(engine)
        engine.cancel(request)
        engine.request(prompt(5), 1)
        assert step(engine).released == (request.sequences[0].sequence_id,)
        engine.request(prompt(5), 1)
        assert request.sequences[0].sequence_id not in step(engine).released


class TestFaults:
    @BOTH_ORDERS
    def test_a_row_that_fails_ends_its_request_alone(self, ahead: bool) -> None:
        engine = Engine(ahead=ahead)
        bad = engine.request(prompt(5), 20, n=3, ignore_eos=True)
        good = engine.request(prompt(5, 2), 20, ignore_eos=True)
        while engine.scheduler.decoding < 4:
            engine.step()
        error = RequestError("logits: all are NaN")
        engine.runner.broken[bad.sequences[1].sequence_id] = error
        engine.run()
        assert [s.state for s in bad.sequences] == [State.FAILED] * 3
        assert all(s.error is error and s.finish_reason is None for s in bad.sequences)
        assert engine.scheduler.failed == 3
        ends = [e.sequence for e in engine.emissions if e.finished and e.token is None]
        assert ends == list(bad.sequences)
        assert output(good) == engine.expected(good.sequences[0], 20)

    def test_launch_failures_are_counted_and_recorded(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = Engine()
        engine.request(prompt(5), 2)
        engine.runner.launch_failures = ["matvec Q4_K: out of registers"]
        with caplog.at_level(logging.WARNING, "asyncllm"):
            engine.run()
        assert engine.scheduler.launch_failures == 1
        (record,) = caplog.records
        assert record.getMessage() == "launch-failure failure=matvec Q4_K: out of registers"

    def test_results_of_another_plan_are_not_taken(self) -> None:
        engine = Engine()
        engine.request(prompt(5), 2)
        engine.scheduler.plan()
        with pytest.raises(InvariantError, match="not those of the oldest plan"):
            engine.scheduler.commit(StepResult((), 0.0), {})
        with pytest.raises(InvariantError, match="no step is outstanding"):
            engine.scheduler.commit(StepResult((), 0.0), {})

    def test_the_check_notices_a_leaked_block(self) -> None:
        engine = Engine()
        request = engine.request(prompt(5), 2, ignore_eos=True)
        step(engine)
        engine.scheduler.check()
        engine.cache.pools[0].take()
        with pytest.raises(InvariantError, match="counts 1, has 0"):
            engine.scheduler.check()
        assert issubclass(InvariantError, AssertionError)
        assert not request.done


class TestEnds:
    def end_after(self, tokens: list[int], least: int) -> int:
        """An id that the tokens have, not before `least` of them."""
        return next(t for i, t in enumerate(tokens) if i >= least and t not in tokens[:i])

    @BOTH_ORDERS
    def test_end_ids_stop_ids_and_stop_strings_end_a_sequence(self, ahead: bool) -> None:
        engine = Engine(ahead=ahead)
        free = engine.expected(engine.request(prompt(5), 1, ignore_eos=True).sequences[0], 30)
        end = self.end_after(free, 3)
        at = free.index(end) + 1
        by_end = engine.request(prompt(5), 30, end=end)
        by_id = engine.request(prompt(5), 30, end=-1, stop_token_ids=[end])
        by_text = engine.request(prompt(5), 30, end=-1)
        engine.stop_at[by_text.sequences[0].sequence_id] = 2
        ignoring = engine.request(prompt(5), 30, end=end, ignore_eos=True)
        engine.run()
        assert output(by_end) == output(by_id) == free[:at]
        assert output(by_text) == free[:2]
        assert output(ignoring) == free
        ends = [(r.sequences[0].finish_reason, r.sequences[0].stop) for r in engine.requests[1:]]
        assert ends == [("stop", end), ("stop", end), ("stop", "STOP"), ("length", None)]

    def test_nothing_ends_it_before_min_tokens(self) -> None:
        engine = Engine()
        request = engine.request(prompt(5), 30, min_tokens=2, stop_token_ids=[7])
        sequence = request.sequences[0]
        assert [sequence.ends_with(7), sequence.ends_with(0), sequence.ends_with(8)] == [False] * 3
        sequence.output_ids += [1, 2]
        assert [sequence.ends_with(7), sequence.ends_with(0), sequence.ends_with(8)] == [
            True,
            True,
            False,
        ]
        assert request.sequences[0].spec.end_ids == {0, 7}

    def test_what_is_emitted_is_what_was_committed(self) -> None:
        engine = Engine()
        request = engine.request(prompt(20), 6, logprobs=0, ignore_eos=True)
        engine.run()
        assert [e.token for e in engine.emissions] == output(request)
        assert [e.logprob is not None for e in engine.emissions] == [True] * 6
        assert [e.finished for e in engine.emissions] == [False] * 5 + [True]
        sequence = request.sequences[0]
        assert sequence.admitted_at is not None
        assert sequence.first_token_at is not None
        assert sequence.first_token_at >= sequence.admitted_at


class TestOneStepAhead:
    def test_a_decode_is_planned_before_its_token_is_known(self) -> None:
        engine = Engine(ahead=True, capacity=[16])
        request = engine.request(prompt(5), 4, ignore_eos=True)
        rows: list[Row] = []
        while engine.scheduler.has_work:
            plan = engine.step()
            rows += plan.rows if isinstance(plan, StepPlan) else ()
        assert [(row.chained, row.offset, row.output_count) for row in rows] == [
            (False, 0, 0),
            (True, 5, 1),
            (True, 6, 2),
            (True, 7, 3),
        ]
        assert output(request) == engine.expected(request.sequences[0], 4)

    def test_one_that_reaches_its_limit_is_not_planned_again(self) -> None:
        engine = Engine(ahead=True)
        engine.request(prompt(5), 1)
        assert isinstance(engine.step(), StepPlan)
        assert engine.scheduler.plan() is NoPlan.IDLE
        assert engine.scheduler.has_work

    def test_growth_preemption_and_forks_collect_first(self) -> None:
        engine = Engine(ahead=True, capacity=[64])
        engine.request(prompt(60), 40, ignore_eos=True)  # 15 of the first 16 blocks
        plans: list[StepPlan | NoPlan] = []
        for _ in range(12):
            plan = engine.scheduler.plan()
            plans.append(plan)
            if plan is NoPlan.COLLECT_FIRST:
                engine.collect()
                plan = engine.scheduler.plan()
            assert isinstance(plan, StepPlan)
            ticket = engine.runner.submit(plan)
            engine.collect()
            engine._ticket = ticket
        assert plans.count(NoPlan.COLLECT_FIRST) == 1
        assert engine.cache.counts()[-1] == 2

        engine = Engine(ahead=True)
        engine.request(prompt(5), 5, n=2)
        engine.step()
        plan = engine.scheduler.plan()
        assert isinstance(plan, StepPlan), "the prompt is not committed yet: nothing to fork"

    def test_two_steps_out_are_one_too_many(self) -> None:
        engine = Engine(ahead=True)
        engine.request(prompt(5), 9, ignore_eos=True)
        engine.scheduler.plan()
        engine.scheduler.plan()
        with pytest.raises(InvariantError, match="two steps are outstanding"):
            engine.scheduler.plan()

    def test_a_stop_drops_the_step_that_was_already_under_way(self) -> None:
        engine = Engine(ahead=True, capacity=[4], block_tokens=2)
        request = engine.request(prompt(3), 6, end=-1)
        engine.stop_at[request.sequences[0].sequence_id] = 2
        follower = engine.request(prompt(4, 2), 4, ignore_eos=True)
        engine.run()
        assert len(output(request)) == 2
        assert output(follower) == engine.expected(follower.sequences[0], 4)


class TestRecords:
    def test_each_step_is_recorded_with_its_phases(self, caplog: pytest.LogCaptureFixture) -> None:
        ticks = count(1)
        engine = Engine(chunk=8, seconds=lambda plan: next(ticks) / 1000)
        with caplog.at_level(logging.DEBUG, "asyncllm"):
            engine.request(prompt(10), 3, ignore_eos=True)
            engine.run()
        fields = [vars(record)["fields"] for record in caplog.records]
        assert [record.getMessage().split()[0] for record in caplog.records] == ["sched-phase"] * 4
        assert [entry["model_ns"] for entry in fields] == [1e6, 2e6, 3e6, 4e6]
        for entry in fields:
            assert entry["total_ns"] >= entry["admission_ns"] + entry["reserve_ns"] > 0
        assert engine.scheduler.steps == 4

    def test_the_decode_form_and_the_reason_against_a_faster_one(self) -> None:
        engine = Engine(chunk=8)
        scheduler = engine.scheduler
        assert (scheduler.decode_mode, scheduler.decode_mode_reason) == ("idle", "")
        first = engine.request(prompt(5), 40, ignore_eos=True)
        plan = step(engine)
        assert (plan.decode_mode, plan.decode_mode_reason) == ("plain", "no sequence is decoding")
        plan = step(engine)
        assert (plan.decode_mode, plan.decode_mode_reason) == ("pipelined", "")
        engine.request(prompt(5, 2), 40, ignore_eos=True)
        plan = step(engine)
        assert plan.decode_mode_reason == "a prompt chunk shares the step"
        plan = step(engine)
        assert (plan.decode_mode, plan.decode_mode_reason) == (
            "batched",
            "2 sequences are decoding",
        )
        engine.cancel(first)
        assert step(engine).decode_mode == "pipelined"
        engine.run()
        engine.step()
        assert (scheduler.decode_mode, scheduler.decode_mode_reason) == ("idle", "")

    def test_the_runners_refusals_are_the_reason(self) -> None:
        refusals: dict[DecodeMode, str] = {
            "pipelined": "no device argmax",
            "batched": "no kernel for IQ2_S",
        }
        engine = Engine(chunk=16, refusals=refusals)
        engine.request(prompt(5), 40, ignore_eos=True)
        step(engine)
        assert step(engine).decode_mode_reason == "no device argmax"
        engine.request(prompt(5, 2), 40, ignore_eos=True)
        step(engine)
        plan = step(engine)
        assert (plan.decode_mode, plan.decode_mode_reason) == ("plain", "no kernel for IQ2_S")
        assert engine.runner.asked == [("pipelined", 1), ("batched", 2)]

    def test_a_sampled_sequence_is_pipelined_where_the_runner_says_nothing_against_it(self) -> None:
        engine = Engine()
        engine.request(prompt(5), 40, ignore_eos=True, temperature=0.5)
        step(engine)
        assert (step(engine).decode_mode, engine.scheduler.decode_mode_reason) == ("pipelined", "")

    def test_counters_tell_requests_waiting_and_sequences_otherwise(self) -> None:
        engine = Engine(max_seqs=2, chunk=4)
        engine.request(prompt(8), 5, n=2, ignore_eos=True)
        engine.request(prompt(8, 2), 5, n=2, ignore_eos=True)
        assert (engine.scheduler.waiting, engine.scheduler.running) == (2, 0)
        step(engine)
        assert (engine.scheduler.waiting, engine.scheduler.prefilling) == (1, 1)
        step(engine)
        assert (engine.scheduler.decoding, engine.scheduler.prefilling) == (1, 0)
        engine.run()
        assert (engine.scheduler.admitted, engine.scheduler.finished) == (4, 4)

    def test_rows_that_recompute_an_output_count_as_prompt_rows(self) -> None:
        engine = Engine(chunk=1, capacity=[5], prefix_cache=False)
        for i in range(2):
            engine.request(prompt(6, i), 14, ignore_eos=True)
        engine.run()
        assert engine.scheduler.resumed
        recomputed = [
            row
            for plan in engine.plans
            for row in plan.rows
            if row.output_count and not row.wants_token
        ]
        assert recomputed
        assert not any(map(is_decode, recomputed))


def test_a_result_is_live_until_its_sequence_ends_or_is_preempted() -> None:
    engine = Engine()
    request = engine.request(prompt(5), 5, ignore_eos=True)
    sequence = request.sequences[0]
    step(engine)
    result = RowResult(sequence.sequence_id, 0, 1)
    assert engine.scheduler.live(result) is sequence
    engine.scheduler._preempt(sequence)
    assert engine.scheduler.live(result) is None
    assert engine.scheduler.live(RowResult(sequence.sequence_id, 1, 1)) is sequence
    engine.cancel(request)
    assert engine.scheduler.live(RowResult(sequence.sequence_id, 1, 1)) is None


def test_the_fake_tokens_depend_on_history_seed_and_index() -> None:
    assert len({next_token(h, s, i, 1 << 30) for h in (1, 2) for s in (1, 2) for i in (0, 1)}) == 8
