"""How many prompt tokens a step may carry, learned from measured step times."""

from __future__ import annotations

from typing import Literal

from asyncllm.options import CHUNK_MAX, CHUNK_MIN

CHUNK_FLOOR = 16  # goes even when nothing fits the pause budget; sizes are multiples of it
EXPLORE_FIRST = 128  # neither slow on a GPU nor a long wait on a slow CPU
RECHECK_AFTER = 32  # full chunks between two looks at a size next to the best
TRIES = 4  # how often an unmeasured size is chosen at first; short prompts may never fill it
FORGET_AFTER = 64  # mixed steps after which slow sizes that were not tried get another chance
WEIGHT_OF_NEWEST = 0.3


class _Average:
    """An exponential average that starts at its first value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, value: float) -> None:
        self.value += WEIGHT_OF_NEWEST * (value - self.value)


class ChunkPolicy:
    """Chooses the chunk.

    While nothing decodes it is the given size, or with `"auto"` the size class (32, 64 and so on
    to the largest) with the best measured tokens per second; every class is tried at first, and the
    neighbours of the best again now and then. While something decodes it is the largest size
    whose step fits the budget by what steps were measured to take, and the floor of 16 when none
    fits. The budget holds for a given size too: the size then is what a chunk never exceeds.

    Args:
        chunk: prompt tokens of a step at most, or `"auto"`.
        budget_ms: milliseconds a step with a prompt chunk may take while sequences decode.
        largest: size class of `"auto"`, a power of two.
        largest_first: whether, with `"auto"`, the largest size class is taken before any was timed:
            on a GPU smaller ones are slower, and trying them would cost more than it tells.

    Attributes:
        maximum: the largest chunk it will ever choose.
    """

    def __init__(
        self,
        chunk: int | Literal["auto"],
        budget_ms: float,
        *,
        largest: int = CHUNK_MAX,
        largest_first: bool = False,
    ) -> None:
        self.maximum = largest if chunk == "auto" else chunk
        self._fixed = None if chunk == "auto" else chunk
        self._budget_s = budget_ms / 1000
        self._speeds: dict[int, _Average] = {}  # tokens per second of full chunks, by class
        self._full_chunks = 0
        self._recheck: int | None = None
        # Seconds by power of two of prompt rows: (rows, seconds) averages, without and with
        # decoding rows in the same step.
        self._alone: dict[int, tuple[_Average, _Average]] = {}
        self._mixed: dict[int, tuple[_Average, _Average]] = {}
        self._decode_s: _Average | None = None
        self._mixed_steps = 0
        self._largest_tried = 0
        sizes = [CHUNK_MIN << i for i in range((largest // CHUNK_MIN).bit_length())]
        self._classes = sizes
        order = [size for size in sizes if size >= EXPLORE_FIRST]
        order += [size for size in reversed(sizes) if size < EXPLORE_FIRST]
        self._tries_left = dict.fromkeys(sizes[-1:] if largest_first else order, TRIES)

    def choose(self, decoding: int) -> int:
        """Prompt tokens the next step may carry.

        Args:
            decoding: sequences that advance their output in the same step.
        """
        if decoding:
            return self._largest_that_fits()
        if self._fixed is not None:
            return self._fixed
        for size, left in self._tries_left.items():
            if left:
                self._tries_left[size] -= 1
                return size
        size, self._recheck = self._recheck or self._best(), None
        return size

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens a second that the fastest steps computed; `None`: none was timed."""
        rates = (rows.value / seconds.value for rows, seconds in self._alone.values())
        return max(rates, default=None)

    def observe(self, prompt_rows: int, decode_rows: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            prompt_rows: tokens of prompts it advanced.
            decode_rows: outputs it advanced.
            seconds: what it took on the device.
        """
        if seconds <= 0:
            return
        if prompt_rows == 0:
            if self._decode_s is None:
                self._decode_s = _Average(seconds)
            else:
                self._decode_s.add(seconds)
            return
        points = self._mixed if decode_rows else self._alone
        size = prompt_rows.bit_length()
        if size in points:
            points[size][0].add(prompt_rows)
            points[size][1].add(seconds)
        else:
            points[size] = _Average(prompt_rows), _Average(seconds)
        if decode_rows:
            self._observe_mixed(size)
        elif prompt_rows in self._classes:
            self._observe_full(prompt_rows, prompt_rows / seconds)

    def _observe_full(self, size: int, speed: float) -> None:
        if size in self._speeds:
            self._speeds[size].add(speed)
        else:
            self._speeds[size] = _Average(speed)
        self._tries_left.pop(size, None)
        self._full_chunks += 1
        if self._full_chunks % RECHECK_AFTER == 0:
            place = self._classes.index(self._best())
            step = 1 if self._full_chunks // RECHECK_AFTER % 2 else -1
            if 0 <= place + step < len(self._classes):
                self._recheck = self._classes[place + step]

    def _best(self) -> int:
        if not self._speeds:
            return EXPLORE_FIRST
        return max(self._speeds, key=lambda size: self._speeds[size].value)

    def _observe_mixed(self, size: int) -> None:
        # A size that was slow once (a first launch, a busy moment) would never be chosen again,
        # so never be measured again: what was not tried for long is forgotten.
        self._largest_tried = max(self._largest_tried, size)
        self._mixed_steps += 1
        if self._mixed_steps % FORGET_AFTER == 0:
            for points in (self._alone, self._mixed):
                for slow in [key for key in points if key > self._largest_tried]:
                    del points[slow]
            self._largest_tried = 0

    def _largest_that_fits(self) -> int:
        decode_s = 0.0 if self._decode_s is None else self._decode_s.value
        points = {size: (r.value, s.value + decode_s) for size, (r, s) in self._alone.items()}
        points |= {size: (r.value, s.value) for size, (r, s) in self._mixed.items()}
        fits = int(self._rows_within_budget(sorted(points.values())))
        floor = min(CHUNK_FLOOR, self.maximum)
        return max(floor, min(fits // CHUNK_FLOOR * CHUNK_FLOOR, self.maximum))

    def _rows_within_budget(self, points: list[tuple[float, float]]) -> float:
        """Largest number of rows whose time fits, between and beyond measured (rows, seconds)."""
        budget = self._budget_s
        above: tuple[float, float] | None = None
        for rows, seconds in reversed(points):
            if seconds <= budget:
                if above is None:  # Beyond the largest: in proportion, which errs to the slow side.
                    return rows * budget / seconds
                share = (budget - seconds) / (above[1] - seconds)
                return rows + (above[0] - rows) * share
            above = rows, seconds
        return 0.0
