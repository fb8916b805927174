"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncllm.errors import RequestError


@dataclass(slots=True)
class _State:
    """A state of the automaton: the longest end of the text that begins a stop string."""

    depth: int = 0
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None  # the next shorter such end
    stop: str | None = None  # the longest stop string that is complete here


class StopMatcher:
    """Cuts a text at the first stop string in it.

    The first is the one whose last character comes first, since there the request ends and no more
    text is waited for; of several that end together it is the longest. Where the text was split
    makes no difference. Text is held back only while it may be the beginning of a stop string.
    The time is linear in the text, whatever the stop strings (Aho and Corasick's automaton).
    """

    def __init__(self, stops: Iterable[str], *, include_stop: bool = False) -> None:
        """Prepare to look for `stops`; with `include_stop` the text ends after it, not before.

        Raises:
            RequestError: for an empty stop string.
        """
        self._include = include_stop
        self._state = self._root = _automaton(stops)
        self._held = ""
        self._ended = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take text; give what may be passed on, and the stop string that ended it, if any.

        After a stop all further text is dropped.
        """
        if self._ended:
            return "", None
        if not self._root.next:
            return text, None
        root, state = self._root, self._state
        for position, character in enumerate(text, 1):
            following = state.next.get(character)
            while following is None and state.fallback is not None:
                state = state.fallback
                following = state.next.get(character)
            state = following or root
            if state.stop is not None:
                self._ended = True
                whole = self._held + text[:position]
                self._held = ""
                cut = len(whole) - (0 if self._include else len(state.stop))
                return whole[:cut], state.stop
        self._state = state
        whole = self._held + text
        certain = len(whole) - state.depth
        self._held = whole[certain:]
        return whole[:certain], None

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        self._state = self._root
        return held


def _automaton(stops: Iterable[str]) -> _State:
    root = _State()
    for stop in stops:
        if not stop:
            raise RequestError("stop: an empty string stops nothing; accepted are strings of text")
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    pending = deque([root])
    while pending:  # by depth, so that what a state falls back on is finished
        parent = pending.popleft()
        for character, state in parent.next.items():
            fallback = parent.fallback
            while fallback is not None and character not in fallback.next:
                fallback = fallback.fallback
            state.fallback = root if fallback is None else fallback.next[character]
            state.stop = state.stop or state.fallback.stop
            pending.append(state)
    return root
