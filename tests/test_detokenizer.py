"""Text made while tokens arrive is the text that all tokens make at once."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.options import SamplingParams
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.stream import TextStream
from asyncllm.text.tokenizer import Tokenizer
from tests.test_tokenizer import CONTROL, NAMES, byte_level, sentence_piece, vocab

SMALL = {
    "bytes": byte_level({"<|endoftext|>": CONTROL}),
    "pieces": sentence_piece(),
    "pieces, no prefix": sentence_piece(add_space_prefix=False),
}
HARD = [
    "é",
    "世界",
    "👋🏽",
    "👨‍👩‍👧",
    " a",
    "  ",
    "\n",
    "ﷺ",
    "\u0301",
    "hello",
    " hello",
    "\ufffd",
    "ß",
]


@cache
def named(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(SMALL[name]) if name in SMALL else vocab(name)


def pieces(tokenizer: Tokenizer, groups: list[list[int]], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.feed(ids) for ids in groups), detokenizer.flush()]


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("name", [*SMALL, *NAMES])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_one_shot_text_for_every_split(
    name: str, data: st.DataObject
) -> None:
    tokenizer = named(name)
    token = st.integers(0, tokenizer.vocab_size - 1)
    # Random ids, and ids of text that is cut anywhere, also within a character.
    text = data.draw(st.lists(st.sampled_from(HARD) | st.text(max_size=3), max_size=6))
    ids = tokenizer.encode(
        "".join(text).encode("utf-8", "replace").decode(), add_special_tokens=False
    )
    ids = ids[data.draw(st.integers(0, 3)) : len(ids) - data.draw(st.integers(0, 3))]
    ids = data.draw(
        st.permutations([ids, data.draw(st.lists(token, max_size=6))]).map(lambda p: p[0] + p[1])
    )
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    cuts = data.draw(st.lists(st.integers(0, 50), max_size=8))
    assert "".join(pieces(tokenizer, split(ids, cuts), skip)) == whole
    one_by_one = pieces(tokenizer, [[i] for i in ids], skip)
    assert "".join(one_by_one) == whole
    for piece in one_by_one:
        piece.encode()  # each is valid Unicode by itself


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole() -> None:
    tokenizer = named("bytes")
    ids = tokenizer.encode("é🙂", add_special_tokens=False)
    assert pieces(tokenizer, [[i] for i in ids], True) == ["", "é", "", "", "", "🙂", ""]


def test_a_character_that_is_never_finished_is_flushed_as_a_replacement() -> None:
    tokenizer = named("bytes")
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    assert pieces(tokenizer, [[i] for i in ids], True) == ["a", "", "", "", "\ufffd"]
    assert tokenizer.decode(ids) == "a\ufffd"


def test_bytes_that_begin_nothing_become_replacements_at_once() -> None:
    tokenizer = named("bytes")
    first, *rest = tokenizer.encode("é", add_special_tokens=False)
    a = tokenizer.encode("a", add_special_tokens=False)
    # The prompt may have ended within a character: the output begins with the rest of it.
    assert pieces(tokenizer, [rest, a, [first], a], True) == ["\ufffd", "a", "", "\ufffda", ""]


def test_sentencepiece_drops_one_space_once_and_byte_level_none() -> None:
    pieces_ = named("pieces")
    hello = pieces_.encode("hello", add_special_tokens=False)
    two = pieces_.encode(" hello", add_special_tokens=False)
    assert pieces(pieces_, [hello, hello], True) == ["hello", " hello", ""]
    assert "".join(pieces(pieces_, [[i] for i in two], True)) == " hello"
    # What is skipped is no beginning.
    assert pieces(pieces_, [[1], hello], True) == ["", "hello", ""]
    assert pieces(pieces_, [[1], hello], False) == ["<s>", " hello", ""]
    bytes_ = named("bytes")
    hello = bytes_.encode(" hello", add_special_tokens=False)
    assert "".join(pieces(bytes_, [[i] for i in hello], True)) == " hello"


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_a_stream_cuts_at_a_stop_string_and_tells_which(name: str) -> None:
    tokenizer = named(name)
    ids = tokenizer.encode("hello wé END more", add_special_tokens=False)
    for include, expected in ((False, "hello wé "), (True, "hello wé END")):
        stream = TextStream(
            tokenizer, SamplingParams(stop=["END"], include_stop_str_in_output=include)
        )
        fed = [stream.feed((i,)) for i in ids]
        assert "".join(text for text, _ in fed) + stream.flush() == expected
        assert [stop for _, stop in fed if stop] == ["END"]
        at_once = TextStream(
            tokenizer, SamplingParams(stop="END", include_stop_str_in_output=include)
        )
        assert at_once.feed(ids) == (expected, "END") and at_once.flush() == ""


def test_a_stream_without_a_stop_gives_the_whole_text_with_its_tail() -> None:
    tokenizer = named("bytes")
    ids = tokenizer.encode("hello EN🙂", add_special_tokens=False)[:-1]
    stream = TextStream(tokenizer, SamplingParams(stop=["END", "\ufffd\ufffd"]))
    text = "".join(stream.feed((i,))[0] for i in ids)
    assert text == "hello EN"[: len(text)] and text + stream.flush() == "hello EN\ufffd"
    plain = TextStream(tokenizer, SamplingParams())
    assert "".join(plain.feed((i,))[0] for i in ids) == "hello EN" and plain.flush() == "\ufffd"


def test_no_stop_is_looked_for_in_the_first_min_tokens() -> None:
    tokenizer = named("bytes")
    ids = tokenizer.encode("XaXbX", add_special_tokens=False)
    assert len(ids) == 5
    for count, expected in ((0, ""), (1, "Xa"), (2, "Xa"), (3, "XaXb"), (5, "XaXbX")):
        for groups in ([ids], [[i] for i in ids]):
            stream = TextStream(tokenizer, SamplingParams(stop="X", min_tokens=count))
            text = "".join(stream.feed(group)[0] for group in groups) + stream.flush()
            assert text == expected
    # A stop string that began among them does not count either.
    stream = TextStream(tokenizer, SamplingParams(stop="aX", min_tokens=2))
    assert stream.feed(ids) == ("XaXbX", None)


def test_a_stream_skips_control_tokens_unless_told_otherwise() -> None:
    tokenizer = named("bytes")
    ids = tokenizer.encode("hello<|endoftext|>", parse_special_tokens=True)
    assert TextStream(tokenizer, SamplingParams()).feed(ids) == ("hello", None)
    kept = TextStream(tokenizer, SamplingParams(skip_special_tokens=False))
    assert kept.feed(ids) == ("hello<|endoftext|>", None)
