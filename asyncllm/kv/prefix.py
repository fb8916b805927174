"""Which tokens a block's K/V was computed from: chained keys, believed only after a comparison.

The K/V of a block depends on every token before it, so a block is known by the whole prefix that
ends with it. A `Prefix` names one; equal prefixes are one object while anything holds it, so
that pools find blocks by identity and a hit on the last block vouches for all the tokens before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakValueDictionary

import xxhash


class Prefix:
    """Tokens of a sequence up to the end of a block.

    Attributes:
        parent: the prefix one block shorter; `None` for the root, which stands for a salt.
        tokens: ids of the last block as packed 32-bit integers; for a root the salt.
        key: 16 bytes, XXH3-128 over the parent's key and the tokens, seeded by the fingerprint.
    """

    __slots__ = ("__weakref__", "key", "parent", "tokens")

    def __init__(self, parent: Prefix | None, tokens: bytes, key: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key


def digest(data: bytes, seed: int) -> bytes:
    """XXH3-128 of the data, 16 bytes."""
    return xxhash.xxh3_128_digest(data, seed=seed)


class PrefixIndex:
    """Finds the one object for a prefix by its key.

    Args:
        fingerprint: of the model and of everything that changes what K/V means.
        block_tokens: tokens in one block.
    """

    def __init__(self, fingerprint: bytes, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._seed = xxhash.xxh3_64_intdigest(fingerprint)
        self._known: WeakValueDictionary[bytes, Prefix] = WeakValueDictionary()

    def root(self, salt: bytes) -> Prefix | None:
        """The empty prefix under a salt; `None` if its key is another's."""
        return self._intern(None, salt)

    def child(self, parent: Prefix, tokens: bytes) -> Prefix | None:
        """The prefix one block longer; `None` if its key is already that of other tokens."""
        return self._intern(parent, tokens)

    def _intern(self, parent: Prefix | None, tokens: bytes) -> Prefix | None:
        key = digest((b"" if parent is None else parent.key) + tokens, self._seed)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Prefix(parent, tokens, key)
        elif known.parent is not parent or known.tokens != tokens:
            return None  # Two prefixes, one key: the later one is neither shared nor published.
        return known


class Chain:
    """The prefixes of one sequence's tokens, each a block longer than the one before."""

    def __init__(self, index: PrefixIndex, salt: bytes) -> None:
        self._index = index
        self._root = index.root(salt)
        self._prefixes: list[Prefix] = []

    def reach(self, tokens: Callable[[int, int], Sequence[int]], blocks: int) -> None:
        """Make the prefixes of the first `blocks` full blocks, or fewer after a key collision.

        Args:
            tokens: ids at positions start to stop - 1 of the sequence, given (start, stop).
            blocks: how many full blocks the sequence's known tokens must at least have.
        """
        size = self._index.block_tokens
        while self._root is not None and len(self._prefixes) < blocks:
            start = len(self._prefixes) * size
            parent = self._prefixes[-1] if self._prefixes else self._root
            packed = array("I", tokens(start, start + size)).tobytes()
            prefix = self._index.child(parent, packed)
            if prefix is None:
                self._root = None  # Nothing past a collision can be told apart by its key.
                return
            self._prefixes.append(prefix)

    def __len__(self) -> int:
        return len(self._prefixes)

    def __getitem__(self, block: int) -> Prefix:
        return self._prefixes[block]

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes)
