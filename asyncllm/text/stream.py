"""One output's text: its tokens' characters, cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from asyncllm.options import SamplingParams
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.stops import StopMatcher
from asyncllm.text.tokenizer import Tokenizer


class TextStream:
    """Makes the text of one output as its tokens come."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        stops = (params.stop,) if isinstance(params.stop, str) else params.stop
        self._stops = StopMatcher(stops, include_stop=params.include_stop_str_in_output)
        self._unwatched_tokens = params.min_tokens
        self._stopped = False

    def feed(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Take tokens; give the text that is settled, and the stop string that was met, if any.

        The text of the first `min_tokens` tokens is not searched, nor does a stop string begin in
        it. After a stop all further tokens are dropped.
        """
        if self._stopped:
            return "", None
        unwatched = ids[: self._unwatched_tokens]
        self._unwatched_tokens -= len(unwatched)
        text = self._detokenizer.feed(unwatched)
        more, stop = self._stops.feed(self._detokenizer.feed(ids[len(unwatched) :]))
        self._stopped = stop is not None
        return text + more, stop

    def flush(self) -> str:
        """What was held back: possible beginnings of a stop string, and an unfinished character.

        An unfinished character becomes U+FFFD; that it completes a stop string ends nothing more.
        """
        if self._stopped:
            return ""
        tail = self._detokenizer.flush()
        more, _ = self._stops.feed(tail)
        return more + self._stops.flush()
