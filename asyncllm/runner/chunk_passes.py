"""`ChunkPasses`: passes with prompt chunks, captured when a size comes again.

Issuing the kernels of a pass takes the host longer than the device needs for a short prompt. Sizes
are rounded up so that few captures serve all; what is added only pads.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from asyncllm import telemetry
from asyncllm.runner.cuda_step import CudaProgram

# Captures of different sizes that are kept; others are issued kernel by kernel.
MOST_CAPTURES: Final = 64

# Up to so many rows sizes are multiples of the second number.
STEPS: Final = ((64, 16), (512, 32), (1024, 64))
LAST_STEP: Final = 128


def rounded(count: int) -> int:
    """Rows of a pass that has room for `count`: above 256 at most an eighth more."""
    step = next((step for most, step in STEPS if count <= most), LAST_STEP)
    return -(-count // step) * step


class ChunkPasses:
    """Runs a program's passes of several rows a sequence.

    Args:
        program: what computes.
        captures: whether the device can capture; sizes are left as they are where it cannot.
    """

    def __init__(self, program: CudaProgram, *, captures: bool) -> None:
        self._program, self._captures = program, captures
        device = program.device
        self._words = torch.zeros(3 * program.max_rows, dtype=torch.int32, device=device)
        self._spans = torch.zeros(program.max_batch, 4, dtype=torch.int32, device=device)
        self._seen: set[tuple[int, int]] = set()
        self._graphs: dict[tuple[int, int], tuple[Any, int]] = {}

    def size(self, rows: int, sequences: int) -> tuple[int, int]:
        """Rows and sequences that a pass is to be padded to."""
        if not self._captures:
            return rows, sequences
        program = self._program
        together = 1 << (sequences - 1).bit_length()
        return min(rounded(rows), program.max_rows), min(together, program.max_batch)

    def run(self, words: Tensor, spans: Tensor, size: tuple[int, int]) -> None:
        """A pass of `size`.

        Args:
            words: int32, on the host, flat: slots, positions and tokens of all rows, as
                `CudaProgram.chunks` takes them; a slot below 0 pads.
            spans: int32 [sequences or more, 4], on the host; 0 rows pad.
            size: what `size` gave.
        """
        rows, together = size
        own = self._words[: 3 * rows]
        own.copy_(words[: 3 * rows], non_blocking=True)
        self._spans[:together].copy_(spans[:together], non_blocking=True)
        if size not in self._graphs and size in self._seen and self._captures:
            self._capture(size)
        if size in self._graphs:
            graph, newest = self._graphs[size]
            graph.replay()
            self._program.newest = newest
            return
        self._issue(size)
        self._seen.add(size)  # all it needs is compiled

    def close(self) -> None:
        """Let go of all captures. Idempotent."""
        self._graphs.clear()
        self._captures = False

    def _issue(self, size: tuple[int, int]) -> None:
        rows, together = size
        slots, positions, fresh = self._words[: 3 * rows].view(3, rows)
        self._program.chunks(slots, positions, fresh, self._spans[:together], rows)

    def _capture(self, size: tuple[int, int]) -> None:
        if len(self._graphs) >= MOST_CAPTURES:
            return
        started, graph = perf_counter(), torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which waits for the device and collects garbage first.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._issue(size)
        finally:
            graph.capture_end()
        self._graphs[size] = graph, self._program.newest
        seconds = perf_counter() - started
        telemetry.record("chunk-captured", rows=size[0], sequences=size[1], seconds=seconds)
