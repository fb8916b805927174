"""Finding any of many spellings in a text, the longest at each place, in one pass."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_MAX_NESTING = 100  # of groups in a pattern; deeper, alternatives are listed in full


def any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of the spellings at the leftmost place where one begins.

    Thousands of alternatives are shared by their beginnings (a trie), so that the time is linear
    in the text whatever their number.
    """
    trie: dict[str, Any] = {}
    for spelling in spellings:
        node = trie
        for character in spelling:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_pattern(trie) if trie else r"(?!)")


def _pattern(node: dict[str, Any], depth: int = 0) -> str:
    if depth > _MAX_NESTING:
        rest = sorted(_rest(node), key=len, reverse=True)
        return f"(?:{'|'.join(map(re.escape, rest))})"
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        prefix += re.escape(character)
    branches = [
        re.escape(character) + _pattern(below, depth + 1)
        for character, below in node.items()
        if character
    ]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def _rest(node: dict[str, Any]) -> list[str]:
    """Every way to go on from a node to the end of a spelling."""
    found: list[str] = []
    pending = [("", node)]
    while pending:
        text, node = pending.pop()
        for character, below in node.items():
            if character:
                pending.append((text + character, below))
            else:
                found.append(text)
    return found
