"""What was measured, as text and as plain values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncllm.bench.workload import Workload
from asyncllm.info import LoadStage


@dataclass(frozen=True, slots=True)
class Figures:
    """A value for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "min": min(self.rounds),
            "max": max(self.rounds),
            "rounds": list(self.rounds),
        }

    def __str__(self) -> str:
        return self.shown(1)

    def shown(self, digits: int) -> str:
        """The median with the range."""
        low, high = min(self.rounds), max(self.rounds)
        return f"{self.median:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One workload.

    Attributes:
        threads: with so many; `None`: on a GPU.
        workload: what ran.
        ours: tokens per second.
        theirs: the same of the other side; `None` where there is nothing to say.
        first_token_ms: milliseconds until the first token of a prompt that is alone.
        host_us: microseconds of a step that the engine thread worked.
    """

    threads: int | None
    workload: Workload
    ours: Figures
    theirs: Figures | None = None
    first_token_ms: Figures | None = None
    host_us: Figures | None = None

    @property
    def label(self) -> str:
        prefix = "" if self.threads is None else f"threads {self.threads}: "
        return prefix + self.workload.label

    @property
    def ratio(self) -> float | None:
        """Of the medians, ours to theirs."""
        return None if self.theirs is None else self.ours.median / self.theirs.median

    @property
    def ratios(self) -> Figures | None:
        """Of each round."""
        if self.theirs is None:
            return None
        pairs = zip(self.ours.rounds, self.theirs.rounds, strict=True)
        return Figures(tuple(ours / theirs for ours, theirs in pairs))

    def as_dict(self) -> dict[str, Any]:
        ratios = self.ratios
        return {
            "threads": self.threads,
            "workload": self.workload.kind,
            "sequences": self.workload.sequences,
            "depth": self.workload.depth,
            "prompt_tokens": self.workload.prompt_tokens,
            "tokens": self.workload.tokens,
            "asyncllm": self.ours.as_dict(),
            "llamacpp": _plain(self.theirs),
            "ratio": self.ratio,
            "ratio_min": None if ratios is None else min(ratios.rounds),
            "ratio_max": None if ratios is None else max(ratios.rounds),
            "first_token_ms": _plain(self.first_token_ms),
            "host_us_per_step": _plain(self.host_us),
        }


def _plain(figures: Figures | None) -> dict[str, Any] | None:
    return None if figures is None else figures.as_dict()


@dataclass(frozen=True, slots=True)
class Load:
    """One load of the model, in the order in which they came.

    Attributes:
        threads: asked for; `None`: on a GPU.
        seconds: from the call until the engine was there.
        stages: of `ModelInfo.load_stages`.
    """

    threads: int | None
    seconds: float
    stages: tuple[LoadStage, ...]

    def as_dict(self) -> dict[str, Any]:
        stages = {stage.name: stage.seconds for stage in self.stages}
        return {"threads": self.threads, "seconds": self.seconds, "stages": stages}

    def __str__(self) -> str:
        stages = ", ".join(f"{stage.name} {stage.seconds:.2f}" for stage in self.stages)
        return f"{self.seconds:.2f} s" + (f": {stages}" if stages else "")


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, and on what.

    Attributes:
        ran_on: label to value: model, machine, versions.
        rows: the figures, tokens per second.
        notes: what a reader should know of how they came about.
        loads: of our engine.
        read_ceilings: bytes per second that can be read, by what reads.
        weights_bytes: of the model.
        allocations: of the steps of a decoding batch, by its size: torch's on the device.
    """

    ran_on: dict[str, str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    loads: tuple[Load, ...] = ()
    read_ceilings: Mapping[str, float] = field(default_factory=dict)
    weights_bytes: int = 0
    allocations: Mapping[int, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "ran_on": self.ran_on,
            "tokens_per_second": [row.as_dict() for row in self.rows],
            "loads": [load.as_dict() for load in self.loads],
            "read_bytes_per_second": dict(self.read_ceilings),
            "weights_bytes": self.weights_bytes,
            "allocations": [
                {"sequences": batch, "allocations": count}
                for batch, count in self.allocations.items()
            ],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """As text."""
        head = [*self.ran_on.items(), *self._more(), *(("note", note) for note in self.notes)]
        width = max(len(label) for label, _ in head)
        out = [f"{label:{width}}  {value}" for label, value in head]
        cells = self._table()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        out.append("")
        for line in cells:
            padded = (cell.ljust(size) for cell, size in zip(line, widths, strict=True))
            out.append("  ".join(padded).rstrip())
        return out

    def _more(self) -> list[tuple[str, str]]:
        out = [("load", str(load)) for load in self.loads]
        for reader, speed in self.read_ceilings.items():
            once = f"; all weights in {self.weights_bytes / speed * 1e3:.2f} ms"
            out.append(("read", f"{speed / 1e9:,.1f} GB/s, {reader}{once}"))
        for batch, count in self.allocations.items():
            out.append(("allocations", f"{count} while a batch of {batch} decoded"))
        return out

    def _table(self) -> list[list[str]]:
        rows = self.rows
        columns = [
            ["tokens/s, median (min..max)", *(row.label for row in rows)],
            ["asyncllm", *(str(row.ours) for row in rows)],
        ]
        if any(row.theirs is not None for row in rows):
            columns.append(["llama.cpp", *(_cell(row.theirs, 1) for row in rows)])
            columns.append(["ratio", *(_ratio(row) for row in rows)])
        if any(row.first_token_ms is not None for row in rows):
            columns.append(["first token, ms", *(_cell(row.first_token_ms, 1) for row in rows)])
        if any(row.host_us is not None for row in rows):
            columns.append(["host, us a step", *(_cell(row.host_us, 0) for row in rows)])
        return [list(line) for line in zip(*columns, strict=True)]


def _cell(figures: Figures | None, digits: int) -> str:
    return "-" if figures is None else figures.shown(digits)


def _ratio(row: Row) -> str:
    if row.ratios is None:
        return "-"
    return f"{row.ratio:.2f} ({min(row.ratios.rounds):.2f}..{max(row.ratios.rounds):.2f})"
