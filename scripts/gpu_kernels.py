"""Time the GPU backend's kernels beside the products, each in a CUDA graph of its own.

Usage: python scripts/gpu_kernels.py [--batches 1 8 32 64] [--contexts 128 4096]
                                     [--chunks 512 2048] [--repeats 20] [--small]

The shape is that of an 8B model. A graph holds a kernel many times over; the time is that of one,
the median over replays, with and without programmatic dependent launch. `--small` runs everything
once on a tiny shape, in Triton's interpreter where there is no GPU: nothing of it is a measurement.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

INNER = 50  # times that a graph holds a kernel


@dataclass(frozen=True)
class Shape:
    """A model's dimensions."""

    heads: int
    kv_heads: int
    head_dim: int
    embedding: int
    feed_forward: int
    vocabulary: int
    block_tokens: int = 16


LARGE = Shape(32, 8, 128, 4096, 14336, 128256)
SMALL = Shape(4, 2, 64, 128, 256, 600)

Case = tuple[str, Callable[..., object]]  # takes `pdl`


class Timer:
    """Prints a line for each case."""

    def __init__(self, device: str, repeats: int) -> None:
        self._device, self._repeats = device, repeats
        print(f"{'kernel':58} {'us':>9} {'us, PDL':>9}")

    def __call__(self, case: Case) -> None:
        name, launch = case
        if self._device == "cpu":
            launch(pdl=False)
            print(f"{name:58} {'ran':>9}", flush=True)
            return
        try:
            times = [self._time(launch, pdl) for pdl in (False, True)]
        except Exception as error:
            # One that does not compile must not hide the others' times.
            print(f"{name:58} {type(error).__name__}: {str(error)[:300]}", flush=True)
            return
        print(f"{name:58} {times[0]:9.2f} {times[1]:9.2f}", flush=True)

    def _time(self, launch: Callable[..., object], pdl: bool) -> float:
        """Microseconds."""
        launch(pdl=pdl)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(INNER):
                launch(pdl=pdl)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        times: list[float] = []
        for _ in range(3 + self._repeats):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) * 1000 / INNER)
        return statistics.median(times[3:])


def quantised(
    rows: int, width: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.zeros(rows, 2, width // 8, dtype=torch.int32, device=device),
        torch.zeros(rows, width // 32, device=device),
        torch.zeros(rows, width // 32, dtype=torch.int32, device=device),
    )


def row_cases(shape: Shape, batch: int, device: str) -> Iterator[Case]:
    """Norms, gates, quantisation and heads."""
    from asyncllm.kernels.cuda import rows

    width, inner = shape.embedding, shape.feed_forward
    x, added, into = (torch.randn(batch, width, device=device) for _ in range(3))
    weight = torch.ones(width, device=device)
    to, wide = quantised(batch, width, device), quantised(batch, inner, device)
    gate_up = torch.randn(batch, 2 * inner, device=device)
    half = torch.zeros(batch, inner, dtype=torch.float16, device=device)

    norm = partial(rows.norm, x, weight, 1e-5, quantised=to, added=added, into=into)
    for parts, warps in ((1, 4), (1, 8), (1, 16), (4, 8), (16, 8)):
        yield (
            f"add, norm, quantise, {parts} parts, {warps} warps",
            partial(norm, parts=parts, warps=warps),
        )
    for blocks, warps in ((4, 2), (8, 4), (16, 4), (32, 8)):
        yield (
            f"gate, quantise, {blocks} blocks, {warps} warps",
            partial(rows.gate, gate_up, "silu", quantised=wide, blocks=blocks, warps=warps),
        )
    yield "gate to float16", partial(rows.gate, gate_up, "silu", half=half)
    yield "quantise", partial(rows.quantise, x, to)


@dataclass(frozen=True)
class Cache:
    """A pool, its tables, and tables of angles."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, shape: Shape, seqs: int, context: int, device: str) -> Cache:
        blocks = -(-context // shape.block_tokens)
        size = (seqs * blocks, shape.block_tokens, shape.kv_heads, shape.head_dim)
        order = torch.randperm(seqs * blocks).view(seqs, blocks).to(torch.int32)
        angles = torch.arange(context).double()[:, None] * 500000.0 ** -(
            torch.arange(shape.head_dim // 2).double() * 2 / shape.head_dim
        )
        return cls(
            torch.randn(size, dtype=torch.float16, device=device),
            torch.randn(size, dtype=torch.float16, device=device),
            order.to(device),
            angles.cos().float().to(device),
            angles.sin().float().to(device),
        )


def attention_cases(shape: Shape, batch: int, context: int, device: str) -> Iterator[Case]:
    """Heads and attention of decoding rows, each at the end of its context."""
    from asyncllm.kernels.cuda import attention, rows

    cache = Cache.of(shape, batch, context, device)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device=device)
    q = torch.randn(batch, shape.heads, shape.head_dim, device=device).half()
    qkv = torch.randn(batch, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device=device)
    to = quantised(batch, shape.heads * shape.head_dim, device)
    pool = (cache.keys, cache.values, cache.tables, None, slots, positions)

    for tile in (1, 2, 4, 8):
        if shape.kv_heads % tile == 0:
            yield (
                f"heads, K/V write, {tile} heads a program",
                partial(rows.heads,
                    qkv, q, *pool, cache.cos, cache.sin,
                    scale=0.1, interleaved=False, tile=tile,
                ),
            )  # fmt: skip
    best = attention.decode_splits(batch, shape.kv_heads, context)
    for splits in sorted({max(1, best // 2), best, best * 2, best * 4}):
        if splits * 32 > max(context, 32):
            continue
        scratch = attention.DecodeScratch.of(
            batch, shape.heads, shape.kv_heads, shape.head_dim, splits, device
        )
        for tile, warps, stages in ((64, 4, 2), (64, 4, 3), (32, 4, 3), (64, 2, 2), (128, 4, 2)):
            own = " (default)" if (splits, tile, warps, stages) == (best, 64, 4, 2) else ""
            yield (
                f"decode, {splits} splits, {tile} keys, {warps} warps, {stages} stages{own}",
                partial(
                    attention.decode,
                    q,
                    *pool,
                    scratch,
                    quantised=to,
                    tile=tile,
                    warps=warps,
                    stages=stages,
                ),
            )


def prefill_cases(shape: Shape, chunk: int, before: int, device: str) -> Iterator[Case]:
    """Heads and attention of one chunk that follows `before` tokens."""
    from asyncllm.kernels.cuda import attention, rows

    cache = Cache.of(shape, 1, before + chunk, device)
    slots = torch.zeros(chunk, dtype=torch.int32, device=device)
    positions = torch.arange(before, before + chunk, dtype=torch.int32, device=device)
    spans = torch.tensor([[0, chunk, before, 0]], dtype=torch.int32, device=device)
    q = torch.randn(chunk, shape.heads, shape.head_dim, device=device).half()
    qkv = torch.randn(chunk, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device=device)
    half = torch.zeros(chunk, shape.heads * shape.head_dim, dtype=torch.float16, device=device)
    yield (
        "heads, K/V write",
        partial(rows.heads,
            qkv, q, cache.keys, cache.values, cache.tables, None, slots, positions,
            cache.cos, cache.sin, scale=0.1, interleaved=False,
        ),
    )  # fmt: skip
    for lines, tile, warps, stages in (
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 4, 2),
        (128, 128, 8, 2),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
    ):
        yield (
            f"prefill, {lines} lines, {tile} keys, {warps} warps, {stages} stages",
            partial(attention.prefill,
                q, cache.keys, cache.values, cache.tables, None, spans, chunk,
                half=half, lines=lines, tile=tile, warps=warps, stages=stages,
            ),
        )  # fmt: skip


def choice_cases(shape: Shape, batch: int, device: str) -> Iterator[Case]:
    """Tokens from logits."""
    from asyncllm.kernels.cuda import choice

    logits = torch.randn(batch, shape.vocabulary, device=device) * 3
    tokens = torch.zeros(batch, dtype=torch.int32, device=device)
    zeros = torch.zeros(batch, dtype=torch.int32, device=device)

    def draws(top_k: int, top_p: float) -> choice.Draws:
        return choice.Draws(
            temperature=torch.full((batch,), 0.8, device=device),
            top_k=torch.full((batch,), top_k, dtype=torch.int32, device=device),
            top_p=torch.full((batch,), top_p, device=device),
            min_p=torch.zeros(batch, device=device),
            seeds=torch.arange(2 * batch, dtype=torch.int32, device=device).view(batch, 2),
            outputs=zeros,
            indices=zeros,
        )

    for parts in (8, 32, 64, 128):
        if device == "cpu" and parts > 8:
            continue
        scratch = choice.ChoiceScratch.of(batch, shape.vocabulary, device, parts)
        yield (
            f"greedy, {scratch.parts} parts",
            partial(choice.greedy, logits, tokens, scratch),
        )
        for name, how, searches in (
            ("temperature", draws(0, 1.0), (False, False)),
            ("top_k", draws(40, 1.0), (True, False)),
            ("top_p", draws(0, 0.95), (False, True)),
            ("top_k, top_p", draws(40, 0.95), (True, True)),
        ):
            yield (
                f"sample, {name}, {scratch.parts} parts",
                partial(choice.sample, logits, how, tokens, scratch, searches=searches),
            )
    edits = choice.Edits(
        repetition=torch.full((batch,), 1.1, device=device),
        presence=torch.zeros(batch, dtype=torch.float64, device=device),
        frequency=torch.zeros(batch, dtype=torch.float64, device=device),
        counts=torch.zeros(batch, shape.vocabulary, dtype=torch.int16, device=device),
        bias_ids=torch.zeros(batch, 8, dtype=torch.int32, device=device),
        biases=torch.zeros(batch, 8, device=device),
    )
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    yield "edit: repetition penalty", partial(choice.edit, logits, edits, slots, zeros)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--parts", nargs="+", default=["rows", "attention", "prefill", "choice"],
        choices=["rows", "attention", "prefill", "choice"],
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a rehearsal")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = LARGE
    if options.small:
        shape = SMALL
        options.batches, options.contexts, options.chunks = [2], [96], [40]
    elif device == "cpu":
        parser.error("there is no GPU; --small rehearses in the interpreter")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # triton looks at it when it is imported
    else:
        versions = f"torch {torch.__version__}, triton {version('triton')}"
        print(f"{torch.cuda.get_device_name()}, {versions}")
    timer = Timer(device, options.repeats)
    for batch in options.batches:
        if "rows" in options.parts:
            print(f"-- batch {batch}")
            for case in row_cases(shape, batch, device):
                timer(case)
        for context in options.contexts if "attention" in options.parts else ():
            print(f"-- batch {batch}, context {context}")
            for case in attention_cases(shape, batch, context, device):
                timer(case)
        if "choice" in options.parts:
            print(f"-- batch {batch}, vocabulary {shape.vocabulary}")
            for case in choice_cases(shape, batch, device):
                timer(case)
    for chunk in options.chunks if "prefill" in options.parts else ():
        for before in (0, chunk):
            print(f"-- chunk {chunk} after {before}")
            for case in prefill_cases(shape, chunk, before, device):
                timer(case)


if __name__ == "__main__":
    main()
