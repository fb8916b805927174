"""Prefixes: one object for equal tokens, and no belief in keys alone."""

from __future__ import annotations

import pytest

from asyncllm.kv import prefix as prefix_module
from asyncllm.kv.prefix import Chain, PrefixIndex


def chain_of(index: PrefixIndex, tokens: list[int], salt: bytes = b"") -> Chain:
    chain = Chain(index, salt)
    chain.reach(lambda start, stop: tokens[start:stop], len(tokens) // index.block_tokens)
    return chain


def test_equal_tokens_give_the_same_prefixes_and_others_do_not() -> None:
    index = PrefixIndex(b"model", 2)
    one, same = chain_of(index, [1, 2, 3, 4, 5]), chain_of(index, [1, 2, 3, 4])
    other = chain_of(index, [1, 2, 3, 5])
    assert len(one) == 2
    assert one[0] is same[0] is other[0]
    assert one[1] is same[1]
    assert one[1] is not other[1]


def test_a_block_is_known_by_everything_before_it() -> None:
    index = PrefixIndex(b"model", 2)
    assert chain_of(index, [1, 2, 3, 4])[1] is not chain_of(index, [9, 2, 3, 4])[1]


def test_salts_and_fingerprints_separate() -> None:
    index = PrefixIndex(b"model", 2)
    plain, salted = chain_of(index, [1, 2]), chain_of(index, [1, 2], b"tenant")
    assert plain[0] is not salted[0]
    assert plain[0].key != salted[0].key
    assert chain_of(PrefixIndex(b"other model", 2), [1, 2])[0].key != plain[0].key
    assert chain_of(PrefixIndex(b"model", 2), [1, 2])[0].key == plain[0].key


def test_ids_are_told_apart_over_32_bits() -> None:
    index = PrefixIndex(b"model", 1)
    assert chain_of(index, [1])[0] is not chain_of(index, [1 + (1 << 31)])[0]


def test_a_key_that_two_prefixes_share_is_believed_for_the_first_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = PrefixIndex(b"model", 2)
    honest = prefix_module.digest

    def colliding(data: bytes, seed: int) -> bytes:
        packed = len(data) == 16 + 8  # a parent's key and two ids: everything but a root
        return b"\0" * 16 if packed else honest(data, seed)

    monkeypatch.setattr(prefix_module, "digest", colliding)
    first, second = chain_of(index, [1, 2, 3, 4]), chain_of(index, [7, 8, 9, 9])
    assert len(first) == 1, "its second block has the key of its first"
    assert len(second) == 0
    second.reach(lambda start, stop: [7, 8, 9, 9][start:stop], 2)
    assert len(second) == 0, "nothing past a collision can be told apart"


def test_prefixes_are_forgotten_with_their_last_holder() -> None:
    index = PrefixIndex(b"model", 1)
    chain = chain_of(index, [1, 2, 3])
    assert len(index._known) == 4
    last = chain[2]
    del chain
    assert len(index._known) == 4, "the last block vouches for those before"
    assert last.parent is not None
    del last
    assert len(index._known) == 0


def test_a_very_long_chain_is_freed_without_trouble() -> None:
    index = PrefixIndex(b"model", 1)
    chain = chain_of(index, [index % 7 for index in range(200_000)])
    last = chain[len(chain) - 1]
    del chain
    assert last.tokens
    del last
    assert len(index._known) == 0
