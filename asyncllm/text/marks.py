"""Strings that remember which of their characters came from outside a chat template.

A template may trim, split, compare, join and print what messages say; afterwards it must still be
known which characters of the result are theirs, since those must never become control tokens. A
`Marked` string behaves as its plain text in everything a template asks of it, and its results are
`Marked` again. What C code makes of it behind our back (`"".join`, `json.dumps`) sees the text with
two noncharacters around each foreign part, from which `marked` restores it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, SupportsIndex

# Noncharacters: never part of text that is exchanged, so that nothing is lost by refusing them.
BEGIN: Final = "\U0010fffe"
END: Final = "\U0010ffff"
_BOUNDARY: Final = re.compile(f"[{BEGIN}{END}]")
_REPLACED: Final = {ord(BEGIN): "\ufffd", ord(END): "\ufffd"}


class Marked(str):
    """Text with a flag for each character.

    Attributes:
        plain: the text.
        flags: 1 for each character that came from outside, else 0.
    """

    plain: str
    flags: bytes

    def __new__(cls, plain: str, flags: bytes) -> Marked:
        runs = re.finditer(rb"\x00+|\x01+", flags)
        self = super().__new__(
            cls,
            "".join(
                [
                    BEGIN + plain[run.start() : run.end()] + END
                    if flags[run.start()]
                    else plain[run.start() : run.end()]
                    for run in runs
                ]
            ),
        )
        self.plain = plain
        self.flags = flags
        return self

    def _part(self, start: int, end: int) -> Marked:
        return Marked(self.plain[start:end], self.flags[start:end])

    def _parts(self, texts: Iterable[str]) -> list[Marked]:
        """Parts of this text that follow each other, with something left out between them."""
        parts = []
        at = 0
        for text in texts:
            at = self.plain.index(text, at)
            parts.append(self._part(at, at + len(text)))
            at += len(text)
        return parts

    def _like(self, text: str) -> Marked:
        """Another text made of this one: flagged alike if it is as long, else all or nothing."""
        if len(text) == len(self.plain):
            return Marked(text, self.flags)
        return Marked(text, (b"\1" if 1 in self.flags else b"\0") * len(text))

    # What is asked of it is asked of the plain text.

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._like(repr(self.plain))

    def __hash__(self) -> int:
        return hash(self.plain)

    def __eq__(self, other: object) -> bool:
        return bool(self.plain == plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self.plain != plain(other))

    def __lt__(self, other: str) -> bool:
        return bool(self.plain < plain(other))

    def __le__(self, other: str) -> bool:
        return bool(self.plain <= plain(other))

    def __gt__(self, other: str) -> bool:
        return bool(self.plain > plain(other))

    def __ge__(self, other: str) -> bool:
        return bool(self.plain >= plain(other))

    def __len__(self) -> int:
        return len(self.plain)

    def __bool__(self) -> bool:
        return bool(self.plain)

    def __contains__(self, part: object) -> bool:
        return plain(part) in self.plain

    def __iter__(self) -> Iterator[str]:
        return (self._part(i, i + 1) for i in range(len(self.plain)))

    def __getitem__(self, key: SupportsIndex | slice) -> Marked:
        if isinstance(key, slice):
            return Marked(self.plain[key], self.flags[key])
        text = self.plain[key]  # raises what str raises
        return Marked(text, bytes((self.flags[key],)))

    # What is made of it keeps the flags.

    def __add__(self, other: str) -> Marked:
        if not isinstance(other, str):
            return NotImplemented
        right = _as_marked(other)
        return Marked(self.plain + right.plain, self.flags + right.flags)

    def __radd__(self, other: str) -> Marked:
        if not isinstance(other, str):
            return NotImplemented
        return _as_marked(other) + self

    def __mul__(self, count: SupportsIndex) -> Marked:
        return Marked(self.plain * count, self.flags * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Marked:
        return self._like(self.plain % plain(values))

    def strip(self, characters: str | None = None, /) -> Marked:
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None, /) -> Marked:
        left = len(self.plain) - len(self.plain.lstrip(plain(characters)))
        return self._part(left, len(self.plain))

    def rstrip(self, characters: str | None = None, /) -> Marked:
        return self._part(0, len(self.plain.rstrip(plain(characters))))

    def removeprefix(self, prefix: str, /) -> Marked:
        return self._part(len(self) - len(self.plain.removeprefix(plain(prefix))), len(self))

    def removesuffix(self, suffix: str, /) -> Marked:
        return self._part(0, len(self.plain.removesuffix(plain(suffix))))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Marked:
        old = plain(old)
        if not old:
            return self._like(self.plain.replace(old, plain(new), count))
        parts = self.split(old, count)
        return _as_marked(new).join(parts)

    def join(self, parts: Iterable[str], /) -> Marked:
        texts, flags = [], []
        for i, part in enumerate(map(_as_marked, parts)):
            if i:
                texts.append(self.plain)
                flags.append(self.flags)
            texts.append(part.plain)
            flags.append(part.flags)
        return Marked("".join(texts), b"".join(flags))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Marked]:  # type: ignore[override]
        return self._parts(self.plain.split(plain(sep), maxsplit))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Marked]:  # type: ignore[override]
        return self._parts(self.plain.rsplit(plain(sep), maxsplit))

    def splitlines(self, keepends: bool = False) -> list[Marked]:  # type: ignore[override]
        return self._parts(self.plain.splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[Marked, Marked, Marked]:
        before, middle, _ = self.plain.partition(plain(sep))
        return self._three(len(before), len(before) + len(middle))

    def rpartition(self, sep: str, /) -> tuple[Marked, Marked, Marked]:
        before, middle, _ = self.plain.rpartition(plain(sep))
        return self._three(len(before), len(before) + len(middle))

    def _three(self, first: int, second: int) -> tuple[Marked, Marked, Marked]:
        return self._part(0, first), self._part(first, second), self._part(second, len(self))


def _asked(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def ask(self: Marked, *args: Any, **kwargs: Any) -> Any:
        return method(self.plain, *map(plain, args), **kwargs)

    ask.__name__ = name
    return ask


def _made(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def make(self: Marked, *args: Any, **kwargs: Any) -> Marked:
        return self._like(method(self.plain, *map(plain, args), **kwargs))

    make.__name__ = name  # by which the sandbox knows `format`
    return make


for _name in (
    *("count", "encode", "endswith", "find", "index", "rfind", "rindex", "startswith"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
    *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
):
    setattr(Marked, _name, _asked(_name))
for _name in (
    *("capitalize", "casefold", "center", "expandtabs", "ljust", "lower", "rjust", "swapcase"),
    *("title", "translate", "upper", "zfill", "format", "format_map"),
):
    setattr(Marked, _name, _made(_name))


def plain(value: Any) -> Any:
    """A value without marks: the text of a `Marked`, also within a tuple; others as they are."""
    if isinstance(value, Marked):
        return value.plain
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value


def marked(text: str) -> str:
    """Text as C code left it, `Marked` again if it has foreign parts.

    Raises:
        ValueError: if a foreign part was cut in two, so that it is not known what is foreign.
    """
    if isinstance(text, Marked) or not isinstance(text, str) or not _BOUNDARY.search(text):
        return text
    return _as_marked(text)


def unmarked(text: str) -> str:
    """Text that may have marks in it without them, as for a message."""
    return _BOUNDARY.sub("", text.plain if isinstance(text, Marked) else text)


def _as_marked(text: str) -> Marked:
    if isinstance(text, Marked):
        return text
    texts, flags = [], []
    foreign = False
    at = 0
    for boundary in _BOUNDARY.finditer(text):
        texts.append(text[at : boundary.start()])
        flags.append((b"\1" if foreign else b"\0") * (boundary.start() - at))
        if (boundary.group() == BEGIN) is foreign:
            raise ValueError("the template cuts through a message's text in a way unknown here")
        foreign = not foreign
        at = boundary.end()
    if foreign:
        raise ValueError("the template cuts through a message's text in a way unknown here")
    texts.append(text[at:])
    flags.append(b"\0" * (len(text) - at))
    return Marked("".join(texts), b"".join(flags))


def foreign(value: Any) -> Any:
    """A value with every string in it, keys of mappings included, marked as from outside."""
    if isinstance(value, str):
        text = value.translate(_REPLACED) if _BOUNDARY.search(value) else value
        return Marked(text, b"\1" * len(text))
    if isinstance(value, Mapping):
        return {foreign(key): foreign(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [foreign(item) for item in value]
    return value
