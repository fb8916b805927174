"""The K/V accounts: pools, tables, rings, sharing."""

from __future__ import annotations

from collections import Counter

import pytest

from asyncllm.kv.block_pool import FIRST_GROWTH_BLOCKS, BlockPool, InvariantError, Room
from asyncllm.kv.blocks import Copy, KvCache, Match, SequenceBlocks
from asyncllm.kv.prefix import Chain, PrefixIndex
from asyncllm.scheduler.step import LayerGroup


def pool_of(blocks: int) -> BlockPool:
    pool = BlockPool(blocks, lambda asked: asked)
    assert pool.supply(blocks, may_grow=True) is Room.READY
    return pool


def chain_of(length: int, salt: bytes = b"") -> Chain:
    chain = Chain(PrefixIndex(b"model", 1), salt)
    chain.reach(lambda start, stop: range(start, stop), length)
    return chain


def cache_of(
    *groups: tuple[int | None, int], block_tokens: int = 4, max_chunk: int = 8
) -> tuple[KvCache, list[Copy]]:
    layers = [LayerGroup(window, (), 1, capacity) for window, capacity in groups]
    cache = KvCache(
        layers,
        block_tokens=block_tokens,
        max_chunk=max_chunk,
        grow=lambda group, blocks: blocks,
        fingerprint=b"model",
        prefix_cache=True,
    )
    return cache, []


def admit(
    cache: KvCache, tokens: int, life: int, match: Match | None = None
) -> tuple[SequenceBlocks, list[Copy]]:
    copies: list[Copy] = []
    nothing = cache.no_match()
    blocks = cache.admit(match or nothing, tokens, life, True, copies)
    assert isinstance(blocks, SequenceBlocks)
    return blocks, copies


def ids(start: int, stop: int) -> range:
    return range(start + 100, stop + 100)


def compute(cache: KvCache, blocks: SequenceBlocks, tokens: int, chunk: int) -> Chain:
    """Run a prompt through in chunks and publish it."""
    chain, copies = cache.chain(b""), list[Copy]()
    for offset in range(0, tokens, chunk):
        count = min(chunk, tokens - offset)
        assert cache.extend(blocks, offset, count, True, copies) is Room.READY
        cache.publish(blocks, chain, ids, offset + count)
    assert not copies
    return chain


class TestBlockPool:
    def test_a_block_is_free_again_after_its_last_holder(self) -> None:
        pool = pool_of(2)
        block = pool.take()
        pool.hold(block)
        pool.release(block)
        assert (pool.used, pool.free) == (1, 1)
        pool.release(block)
        assert (pool.used, pool.free) == (0, 2)

    def test_releasing_a_block_once_too_often_is_an_error(self) -> None:
        pool = pool_of(2)
        block = pool.take()
        pool.release(block)
        with pytest.raises(InvariantError, match=f"block {block} is released but has no holder"):
            pool.release(block)

    def test_a_published_block_is_kept_and_found_until_its_room_is_needed(self) -> None:
        pool, chain = pool_of(2), chain_of(1)
        block = pool.take()
        pool.publish(block, chain[0])
        pool.release(block)
        assert (pool.used, pool.cached, pool.free) == (0, 1, 1)
        assert pool.find(chain[0]) == block
        pool.hold(block)
        assert (pool.used, pool.cached) == (1, 0)
        pool.release(block)
        taken = {pool.take(), pool.take()}
        assert taken == {0, 1}
        assert pool.find(chain[0]) is None

    def test_the_coldest_block_is_evicted_first(self) -> None:
        pool, chain = pool_of(3), chain_of(3)
        blocks = [pool.take() for _ in range(3)]
        for number in (1, 0, 2):
            pool.publish(blocks[number], chain[number])
            pool.release(blocks[number])
        pool.hold(blocks[1])
        pool.release(blocks[1])  # used again: now the warmest
        assert [pool.take() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]

    def test_of_two_blocks_with_the_same_tokens_one_is_found(self) -> None:
        pool, chain = pool_of(2), chain_of(1)
        first, second = pool.take(), pool.take()
        pool.publish(first, chain[0])
        pool.publish(second, chain[0])
        assert pool.find(chain[0]) == first
        pool.release(second)
        assert (pool.free, pool.cached) == (1, 0)

    def test_it_starts_small_doubles_and_stops_at_its_capacity(self) -> None:
        asked: list[int] = []

        def grow(blocks: int) -> int:
            asked.append(blocks)
            return blocks

        pool = BlockPool(100, grow)
        for _ in range(100):
            assert pool.supply(1, may_grow=True) is Room.READY
            pool.take()
        assert asked == [FIRST_GROWTH_BLOCKS, 16, 32, 36]
        assert pool.growths == 4
        assert pool.supply(1, may_grow=True) is Room.NONE

    def test_it_grows_only_between_steps(self) -> None:
        pool = BlockPool(100, lambda blocks: pytest.fail("it grew"))
        assert pool.supply(1, may_grow=False) is Room.AFTER_COLLECT
        assert pool.reserve(1, may_grow=False) is Room.AFTER_COLLECT

    def test_it_evicts_rather_than_fails_when_growth_is_refused(self) -> None:
        granted = iter([4, 0, 0])
        pool, chain = BlockPool(100, lambda blocks: next(granted)), chain_of(1)
        assert pool.supply(4, may_grow=True) is Room.READY
        blocks = [pool.take() for _ in range(4)]
        assert pool.growable == 0, "less was granted than was asked for"
        pool.publish(blocks[0], chain[0])
        pool.release(blocks[0])
        assert pool.retry_growth()
        assert pool.supply(1, may_grow=True) is Room.READY
        assert pool.take() == blocks[0]
        assert pool.supply(1, may_grow=True) is Room.NONE
        assert not BlockPool(1, lambda blocks: blocks).retry_growth()

    def test_taking_what_is_not_there_is_an_error(self) -> None:
        pool = pool_of(1)
        pool.take()
        with pytest.raises(InvariantError, match="all 1 have holders"):
            pool.take()

    def test_the_check_finds_a_leak_and_a_false_holder(self) -> None:
        pool = pool_of(2)
        block = pool.take()
        pool.check(Counter({block: 1}))
        with pytest.raises(InvariantError, match=f"block {block} counts 1, has 0"):
            pool.check(Counter())
        with pytest.raises(InvariantError, match="counts 0, has 1"):
            pool.check(Counter({0: 1, 1: 1}))


class TestAdmission:
    def test_it_asks_for_the_whole_prompt_and_a_block_of_headroom(self) -> None:
        for capacity, room in ((3, Room.NONE), (4, None)):
            cache, copies = cache_of((None, capacity))
            nothing = cache.no_match()
            admitted = cache.admit(nothing, 12, 20, True, copies)
            assert (admitted if isinstance(admitted, Room) else None) is room
            assert cache.blocks_used == (0 if room else 3)

    def test_no_headroom_is_asked_where_the_whole_life_fits_the_last_block(self) -> None:
        cache, copies = cache_of((None, 3))
        nothing = cache.no_match()
        assert isinstance(cache.admit(nothing, 10, 12, True, copies), SequenceBlocks)

    def test_a_window_asks_for_its_whole_ring_or_the_whole_life_if_that_is_less(self) -> None:
        cache, copies = cache_of((6, 12))
        assert cache.rings == (-(-(6 - 1 + 8) // 4) + 1,) == (5,)
        nothing = cache.no_match()
        first = cache.admit(nothing, 4, 1000, True, copies)
        second = cache.admit(nothing, 4, 1000, True, copies)
        assert isinstance(first, SequenceBlocks)
        assert isinstance(second, SequenceBlocks)
        assert cache.admit(nothing, 4, 1000, True, copies) is Room.NONE, "2 of 12 are left"
        short = cache.admit(nothing, 4, 8, True, copies)
        assert isinstance(short, SequenceBlocks)
        assert short.quota == [2]
        cache.check([first, second, short])

    def test_reused_blocks_are_not_counted_as_room_twice(self) -> None:
        cache, copies = cache_of((None, 6))
        old, _ = admit(cache, 16, 16)
        chain = compute(cache, old, 16, 8)
        cache.release(old)
        assert (cache.blocks_cached, cache.blocks_free + cache.blocks_used) == (4, 2)
        match = cache.match(chain, 16)
        assert match.tokens == 16
        assert cache.admit(match, 25, 28, True, copies) is Room.NONE
        assert cache.blocks_used == 0
        assert isinstance(cache.admit(match, 24, 24, True, copies), SequenceBlocks)

    def test_it_gives_everything_back_when_growth_is_refused(self) -> None:
        cache = KvCache(
            [LayerGroup(None, (), 1, 100), LayerGroup(8, (), 1, 100)],
            block_tokens=4,
            max_chunk=8,
            grow=lambda group, blocks: blocks if group == 0 else 0,
            fingerprint=b"",
            prefix_cache=True,
        )
        nothing = cache.no_match()
        assert cache.admit(nothing, 12, 20, True, []) is Room.NONE
        assert cache.blocks_used == 0
        cache.check([])

    def test_capacity_is_what_one_sequence_can_ever_hold(self) -> None:
        assert cache_of((None, 10))[0].capacity_tokens == 40
        assert cache_of((None, 10), (6, 5))[0].capacity_tokens == 40
        assert cache_of((None, 10), (6, 4))[0].capacity_tokens == 16, "less than a ring"
        assert cache_of((6, 5))[0].capacity_tokens is None


class TestRing:
    def test_it_never_holds_more_than_its_blocks_however_long_the_sequence(self) -> None:
        cache, copies = cache_of((6, 5))
        blocks, _ = admit(cache, 100, 400)
        for offset in (*range(0, 100, 7), *range(100, 300)):
            count = 7 if offset < 98 else 1
            assert cache.extend(blocks, offset, count, False, copies) is not Room.NONE
            assert cache.extend(blocks, offset, count, True, copies) is Room.READY
            cache.check([blocks])
            for position in range(max(0, offset - 5), offset + count):
                assert blocks.first[0] <= position // 4 < blocks.last[0]
            assert len(blocks.tables[0]) <= 5
        assert not copies

    def test_blocks_that_left_the_window_can_be_found_if_they_were_published(self) -> None:
        cache, _ = cache_of((6, 20))
        blocks, _ = admit(cache, 32, 40)
        chain = compute(cache, blocks, 32, 8)
        assert cache.blocks_cached == 4, "those before position 24 - 5"
        assert cache.match(chain, 16).tokens == 16
        cache.check([blocks])

    def test_extending_the_same_rows_again_changes_nothing(self) -> None:
        cache, copies = cache_of((None, 20), (6, 20))
        blocks, _ = admit(cache, 32, 40)
        cache.extend(blocks, 0, 8, True, copies)
        cache.extend(blocks, 8, 8, True, copies)
        before = blocks.snapshot(), cache.blocks_used
        cache.extend(blocks, 8, 8, True, copies)
        assert (blocks.snapshot(), cache.blocks_used) == before


class TestReuse:
    @pytest.mark.parametrize(("prompt", "hit"), [(7, 4), (8, 4), (9, 8), (11, 8), (100, 12)])
    def test_a_hit_leaves_at_least_one_token_to_compute(self, prompt: int, hit: int) -> None:
        cache, _ = cache_of((None, 20))
        blocks, _ = admit(cache, 14, 14)
        chain = compute(cache, blocks, 14, 8)
        assert cache.match(chain, prompt - 1).tokens == hit

    def test_it_shortens_to_where_the_windowed_blocks_are_still_there(self) -> None:
        cache, _ = cache_of((None, 40), (6, 11))
        blocks, _ = admit(cache, 32, 32)
        chain = compute(cache, blocks, 32, 8)
        cache.release(blocks)
        full = cache.match(chain, 32)
        assert (full.tokens, full.first, len(full.blocks[1])) == (32, (0, 6), 2)
        windowed = cache.pools[1]
        while windowed.find(chain[7]) is not None:  # the coldest go until the last one went
            assert windowed.supply(1, may_grow=False) is not Room.NONE
            windowed.take()
        left = [number for number in range(8) if windowed.find(chain[number]) is not None]
        shorter = cache.match(chain, 32)
        reachable = [n for n in range(8) if all(i in left for i in range((n * 4 - 5) // 4, n))]
        assert 0 < shorter.tokens == 4 * max(reachable) < 32

    def test_a_gap_in_the_unwindowed_blocks_ends_the_hit(self) -> None:
        cache, _ = cache_of((None, 4))
        blocks, _ = admit(cache, 16, 16)
        chain = compute(cache, blocks, 16, 8)
        cache.release(blocks)
        cache.pools[0].take()
        assert cache.match(chain, 16).tokens == 12, "the end of a prefix is evicted first"

    def test_only_full_blocks_that_were_computed_are_published(self) -> None:
        cache, copies = cache_of((None, 20))
        blocks, _ = admit(cache, 16, 16)
        chain = cache.chain(b"")
        chain.reach(ids, 4)
        cache.extend(blocks, 0, 8, True, copies)
        assert cache.match(chain, 16).tokens == 0
        cache.publish(blocks, chain, ids, 7)
        assert cache.match(chain, 16).tokens == 4

    def test_a_shared_unfinished_block_is_copied_before_it_is_written(self) -> None:
        cache, _ = cache_of((None, 20), (6, 20))
        first, _ = admit(cache, 14, 40)
        compute(cache, first, 14, 8)
        match = cache.match_sibling(first, 13)
        assert match is not None
        second, copies = admit(cache, 14, 40, match)
        ring = cache.rings[1]
        assert copies == [
            (0, first.entry(0, None, 3), second.entry(0, None, 3)),
            (1, first.entry(1, ring, 3), second.entry(1, ring, 3)),
        ]
        assert first.tables[0][:3] == second.tables[0][:3]
        assert first.tables[0][3] != second.tables[0][3]
        cache.check([first, second])
        cache.release(first)
        cache.check([second])
        cache.release(second)
        cache.release(second)
        assert cache.blocks_used == 0

    def test_a_block_that_can_be_found_is_copied_before_it_is_written(self) -> None:
        cache, _ = cache_of((None, 20))
        first, _ = admit(cache, 8, 40)
        chain = compute(cache, first, 8, 8)
        copies: list[Copy] = []
        found = cache.pools[0].find(chain[1])
        assert cache.extend(first, 7, 1, False, copies) is Room.AFTER_COLLECT
        assert cache.extend(first, 7, 1, True, copies) is Room.READY
        assert copies == [(0, found, first.tables[0][1])]
        assert found != first.tables[0][1]
        assert cache.pools[0].find(chain[1]) == found
        cache.check([first])

    def test_a_sibling_whose_window_moved_on_cannot_be_shared(self) -> None:
        cache, copies = cache_of((None, 20), (6, 20))
        first, _ = admit(cache, 14, 60)
        compute(cache, first, 14, 8)
        for position in range(14, 24):
            cache.extend(first, position, 1, True, copies)
        assert cache.match_sibling(first, 13) is None
