"""What is measured: the settings of a run, its workloads, and what an engine offers for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from asyncllm.errors import AsyncLLMError
from asyncllm.options import EngineOptions

SHORT_PROMPT: Final = 16  # tokens before the outputs that are timed
SEQUENCES: Final = 8
PROMPT_TOKENS: Final = 512

# On a GPU, unless something else is asked for.
GPU_BATCHES: Final = (1, 8, 32, 64)
GPU_PROMPTS: Final = (512, 2048)

ALLOCATION_BATCHES: Final = (1, 32)
ALLOCATION_STEPS: Final = 1000

Kind = Literal["one", "many", "decode", "prompt"]
Prompts = Sequence[Sequence[int]]


class BenchError(AsyncLLMError):
    """Something cannot be measured; the message says what to do."""


class NoWindowError(BenchError):
    """There was no time in which all sequences of a batch were running."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is timed.

    Attributes:
        kind: `"one"` and `"decode"`: tokens of all sequences from when the last has begun until the
            first has ended, over that time; `"many"`: all tokens of several sequences, over the
            time from the submission of all to the end of the last; `"prompt"`: a prompt's tokens,
            over the time from its submission to the first token.
        sequences: that run at once.
        prompt_tokens: of each.
        tokens: output tokens of each.
        depth: tokens that each sequence has when it begins, as far as they are not a short prompt;
            they are computed beforehand.
    """

    kind: Kind
    sequences: int
    prompt_tokens: int
    tokens: int
    depth: int = 0

    @classmethod
    def decode(cls, batch: int, depth: int, tokens: int) -> Workload:
        """A batch that decodes: `tokens` of each sequence at least are timed, less the first."""
        return cls("decode", batch, depth or SHORT_PROMPT, tokens + stagger(batch), depth)

    @property
    def label(self) -> str:
        """For a table."""
        return {
            "one": f"1 sequence, {self.tokens} tokens",
            "many": f"{self.sequences} sequences, {self.tokens} tokens each",
            "decode": f"batch {self.sequences}, depth {self.depth}",
            "prompt": f"prompt of {self.prompt_tokens} tokens",
        }[self.kind]

    def prompts(self, vocabulary: range, excluded: frozenset[int], number: int) -> Prompts:
        """Random ids: others for each number, the same again for the same.

        At a depth they are always the same, so that they are computed once.
        """
        chance = random.Random(f"depth {self.depth}" if self.depth else f"{self} {number}")
        allowed = [token for token in vocabulary if token not in excluded]
        return [chance.choices(allowed, k=self.prompt_tokens) for _ in range(self.sequences)]


def stagger(sequences: int) -> int:
    """Tokens that the first of some sequences may have before the last has begun.

    A step takes two short prompts or more, and some steps pass while all are submitted.
    """
    return 0 if sequences == 1 else sequences // 2 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        model: the checkpoint.
        threads: measure with each of these numbers; empty: the engine's own choice.
        rounds: times that each workload is timed.
        tokens: of one sequence, and of each of a batch; each of many gets half as many.
        sequences: at once; 1 leaves that row out. `None`: 8.
        prompt_tokens: of the long prompt. `None`: 512.
        batches: instead of one and of many, decode with each of these numbers of sequences.
        depths: each batch with so many tokens in each sequence; 0: a short prompt.
        prompts: instead of the long prompt, prompts of each of these lengths.
        allocations: also count what decoding allocates on a GPU.
        reload: also load the model a second time.
        llamacpp: what to compare with: `None`: nothing; `""`: the package xllamacpp; else the path
            of a `llama-bench`.
        llamacpp_model: another file for llama.cpp; `None`: the same.
        options: of our engine; threads, context length and sequences are set here.

    Raises:
        BenchError: naming what is not accepted.
    """

    model: Path
    threads: tuple[int, ...] = ()
    rounds: int = 3
    tokens: int = 128
    sequences: int | None = None
    prompt_tokens: int | None = None
    batches: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    allocations: bool = False
    reload: bool = False
    llamacpp: str | None = None
    llamacpp_model: Path | None = None
    options: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("tokens", 2), ("sequences", 1), ("prompt_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BenchError(f"{name}={value}: accepted is a whole number from {least}")
        for name, least in (("threads", 1), ("batches", 1), ("depths", 0), ("prompts", 1)):
            values = getattr(self, name)
            if any(value < least for value in values):
                raise BenchError(f"{name}={list(values)}: accepted are whole numbers from {least}")
        if self._grid and self.sequences is not None:
            raise BenchError("sequences: batches or depths are given, which stand in its place")
        if self.prompts and self.prompt_tokens is not None:
            raise BenchError("prompt_tokens: prompts are given, which stand in its place")
        if self.llamacpp_model is not None and self.llamacpp is None:
            raise BenchError("a model for llama.cpp is given, and no comparison is asked for")
        if self.llamacpp is not None and self._grid:
            raise BenchError("batches, depths: not compared with llama.cpp; sequences are")

    @property
    def _grid(self) -> bool:
        return bool(self.batches or self.depths)

    @property
    def chosen(self) -> bool:
        """Whether it says what to measure; else that depends on the device."""
        sizes = (self.sequences, self.prompt_tokens)
        return self._grid or bool(self.prompts) or any(size is not None for size in sizes)

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """In the order in which they are timed."""
        return (*self._outputs(), *self._prompts())

    def _outputs(self) -> tuple[Workload, ...]:
        if self._grid:
            return tuple(
                Workload.decode(batch, depth, self.tokens)
                for depth in self.depths or (0,)
                for batch in self.batches or (1,)
            )
        one = Workload("one", 1, SHORT_PROMPT, self.tokens)
        sequences = SEQUENCES if self.sequences is None else self.sequences
        if sequences == 1:
            return (one,)
        return (one, Workload("many", sequences, SHORT_PROMPT, self.tokens // 2))

    def _prompts(self) -> tuple[Workload, ...]:
        default = PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens
        return tuple(Workload("prompt", 1, length, 1) for length in self.prompts or (default,))

    @property
    def allocation_workloads(self) -> tuple[Workload, ...]:
        """Those whose allocations are counted."""
        if not self.allocations:
            return ()
        steps = ALLOCATION_STEPS + 1
        return tuple(Workload.decode(batch, 0, steps) for batch in ALLOCATION_BATCHES)

    @property
    def max_seqs(self) -> int:
        """Sequences that run at once in the largest of them."""
        return max(each.sequences for each in (*self.workloads, *self.allocation_workloads))

    @property
    def context_length(self) -> int:
        """Tokens that the longest of them needs."""
        every = (*self.workloads, *self.allocation_workloads)
        return max(each.prompt_tokens + each.tokens for each in every) + 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One workload, measured once.

    Attributes:
        speed: tokens per second.
        first_token_s: seconds from the submission of a prompt that is alone to its first token.
        host_s: seconds of a step that the engine thread worked, see `EngineStats.host_s`.
    """

    speed: float
    first_token_s: float | None = None
    host_s: float | None = None


class Side(Protocol):
    """An engine that is timed. `close` is idempotent; after it `open` may come again."""

    name: str
    warms_up: bool

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def measure(self, workload: Workload, prompts: Prompts) -> Sample | None:
        """What came of it, or `None` where it has no such workload."""


def check_tokens(name: str, tokens: int, workload: Workload) -> None:
    """Make sure that all were generated.

    Raises:
        BenchError: they were not.
    """
    wanted = workload.sequences * workload.tokens
    if tokens != wanted:
        raise BenchError(f"{name} made {tokens} tokens; {wanted} were asked for")
