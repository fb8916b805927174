"""Counter-based random numbers: Philox4x32-10.

From "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon, Moraes, Dror, Shaw; SC 2011). A number
is a function of its key and counter alone, so there is no state to save, and a token's number is
the same in any batch, on any device and after any preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, device

Word = TypeVar("Word", int, "Tensor")

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def _multiply(multiplier: int, word: Word) -> tuple[Word, Word]:
    """High and low 32 bits of a product, in halves so that no int64 overflows on the way."""
    low = multiplier * (word & 0xFFFF)
    high = multiplier * (word >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _MASK


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Ten rounds of Philox on 32-bit words.

    Args:
        counter: four words: Python ints, or int64 tensors of one shape.
        key: two words, likewise.

    Returns:
        Four random words of the same kind, each 0 to 2**32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, index: int) -> float:
    """A number of 53 random bits in [0, 1).

    Args:
        seed: the key, 0 to 2**64 - 1.
        position: output tokens before the one to be chosen, 0 to 2**64 - 1.
        index: which of the request's `n` outputs, 0 to 2**32 - 1.
    """
    counter = (position & _MASK, position >> 32, index, 0)
    first, second, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32))
    return ((first >> 5) * (1 << 26) + (second >> 6)) / (1 << 53)


def uniforms(
    seeds: Sequence[int],
    positions: Sequence[int],
    indices: Sequence[int],
    device: device | str = "cpu",
) -> Tensor:
    """`uniform` of each triple: float64 [n] on the device, computed there."""
    import torch

    words = [
        [seed & _MASK, seed >> 32, position & _MASK, position >> 32, index]
        for seed, position, index in zip(seeds, positions, indices, strict=True)
    ]
    table = torch.tensor(words, dtype=torch.int64, device=device).view(-1, 5)
    k0, k1, c0, c1, c2 = table.unbind(1)
    first, second, _, _ = philox4x32((c0, c1, c2, torch.zeros_like(c0)), (k0, k1))
    return ((first >> 5) * (1 << 26) + (second >> 6)).to(torch.float64) / (1 << 53)
