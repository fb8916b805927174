"""Stop strings, wherever they fall."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import RequestError
from asyncllm.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    text, found = "", None
    for piece in pieces:
        more, stop = matcher.feed(piece)
        text += more
        if stop is not None:
            assert found is None
            found = stop
    return text + matcher.flush(), found


def naive(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Look at every character whether a stop string ends there, the longest first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab✓", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("ab✓c", max_size=5), max_size=10),
    include=st.booleans(),
)
def test_the_cut_is_the_naive_search_s_however_the_text_is_split(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    text = "".join(pieces)
    expected = naive(stops, text, include)
    assert run(stops, pieces, include) == expected
    assert run(stops, list(text), include) == expected
    assert run(stops, [text], include) == expected


@settings(max_examples=200, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_text_is_held_back_only_while_it_may_begin_a_stop(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = given_out = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        if stop is not None:
            return
        seen += piece
        given_out += text
        held = seen[len(given_out) :]
        assert seen.startswith(given_out)
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert len(held) == longest


def test_a_stop_string_over_several_pieces_is_cut_exactly() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"]) == ("ABC", "DEFGHIJ")
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "X"]) == ("ABCDEFGHIX", None)


def test_a_stop_string_inside_one_piece_is_cut_exactly() -> None:
    assert run(["stop"], ["a nonstop talker"]) == ("a non", "stop")
    assert run(["stop"], ["a nonstop talker"], include=True) == ("a nonstop", "stop")


def test_the_first_stop_to_be_complete_ends_the_text() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["ab", "abc"], ["abc"]) == ("", "ab")
    # Of those that end together it is the longest.
    assert run(["c", "bc", "abc"], ["xabc"]) == ("x", "abc")


def test_a_beginning_that_fails_may_hold_another_beginning() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")
    assert run(["ababc"], list("abababc")) == ("ab", "ababc")


def test_held_text_is_given_out_at_the_end_and_once() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.feed("text <en") == ("text ", None)
    assert matcher.flush() == "<en"
    assert matcher.flush() == ""


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.feed("a\nb") == ("a", "\n")
    assert matcher.feed("c\n") == ("", None)
    assert matcher.flush() == ""


def test_without_stop_strings_all_text_passes_at_once() -> None:
    assert run([], ["a", "", "b"]) == ("ab", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopMatcher(["a", ""])


def test_the_time_is_linear_in_the_text_also_for_stops_that_almost_match() -> None:
    matcher = StopMatcher(["a" * 2000 + "b", "a" * 1999 + "c"])
    start = time.process_time()
    for _ in range(200):
        matcher.feed("a" * 1000)
    assert (
        time.process_time() - start < 5
    )  # measured: 0.03 s; trying each start takes 400 million steps
    assert len(matcher.flush()) == 2000
