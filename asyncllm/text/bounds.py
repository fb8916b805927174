"""Bounds on what one operation of a chat template may make, checked before it takes the memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Final

MAX_CHARACTERS: Final = 1 << 25  # of any string that a template makes, and items of any list
MAX_BITS: Final = 4096  # of a number
MAX_INDENT: Final = 64  # of JSON

_PADDING: Final = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "wordwrap", "zfill")
)
# A width of eight digits or one taken from the arguments, in either kind of format.
_WIDE: Final = re.compile(r"%[^a-zA-Z%]*(\*|\d{8})|\{[^{}]*(\{|\d{8})")


def check_length(length: int) -> None:
    """Refuse a string or list of this length if it is too long."""
    if length > MAX_CHARACTERS:
        raise OverflowError(f"it makes more than {MAX_CHARACTERS} characters")


def bounded(parts: Iterable[str]) -> Iterator[str]:
    """The parts of a string, as long as it does not become too long."""
    length = 0
    for part in parts:
        length += len(part)
        check_length(length)
        yield part


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse `left operator right` if its result would be enormous."""
    if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        check_length(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))
    elif operator == "*":
        for factor, other in ((left, right), (right, left)):
            if isinstance(factor, int) and isinstance(other, Sized):
                check_length(factor * len(other))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())


def check_text_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter or a string's method of that name if its result would be enormous.

    `args` begins with what the filter is applied to, or with the string whose method it is.
    """
    texts = [item for item in (*args, *kwargs.values()) if isinstance(item, str)]
    numbers = [item for item in (*args[1:], *kwargs.values()) if isinstance(item, int)]
    if name in _PADDING:
        lines = max((text.count("\n") + text.count("\t") + 1 for text in texts), default=1)
        check_length(max(numbers, default=0) * lines)
    elif name == "tojson" and max(numbers, default=0) > MAX_INDENT:
        raise OverflowError(f"it indents JSON by more than {MAX_INDENT}")
    elif name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        check_length(len(text) + text.count(old) * len(new))
    elif name == "join":
        items = max((len(i) for i in args if isinstance(i, Sized)), default=0)
        check_length(items * max(map(len, texts), default=0) if len(args) > 1 else 0)
    elif name in ("format", "format_map") and texts:
        _check_format(texts[0])


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise OverflowError("it formats with a width of eight digits or more, or a computed one")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise OverflowError(f"it makes a number of more than {MAX_BITS} bits")
