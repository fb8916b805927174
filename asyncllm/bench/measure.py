"""The order of things: open, warm up, take turns, close."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from asyncllm.bench import llamacpp, machine
from asyncllm.bench.ours import LoadEngine, Ours
from asyncllm.bench.report import Figures, Load, Report, Row
from asyncllm.bench.workload import (
    GPU_BATCHES,
    GPU_PROMPTS,
    BenchError,
    NoWindowError,
    Prompts,
    Sample,
    Settings,
    Side,
    Workload,
    stagger,
)
from asyncllm.engine import AsyncEngine
from asyncllm.info import ModelInfo

WARM_UP_TOKENS: Final = 16
WARM_UP_PROMPTS: Final = 4  # by then the size of prompt chunks is learned
IDLE_S: Final = 0.5
IDLE_CORES: Final = 0.05  # more of a core than this, and idle threads spin
MEMORY_OF_FILE: Final = 2  # an engine takes at most about the mapped file and a repacked copy

Say = Callable[[str], None]
ReadCeilings = Callable[[str, Sequence[int]], dict[str, float]]
Samples = dict[tuple[str, Workload], list[Sample]]


async def bench(
    settings: Settings,
    *,
    load: LoadEngine = AsyncEngine.load,
    say: Say = lambda line: None,
    read_ceilings: ReadCeilings = machine.read_ceilings,
) -> Report:
    """Measure.

    Args:
        settings: what.
        load: makes our engine; for tests.
        say: told what is being done.
        read_ceilings: measures how fast memory is read; for tests.

    Raises:
        BenchError: something cannot be measured here; llama.cpp is not there, or fails.
        ModelLoadError: the model cannot be loaded.
    """
    await asyncio.to_thread(llamacpp.check, settings)
    on_gpu = await asyncio.to_thread(machine.on_gpu, settings.options)
    settings = _suited(settings, on_gpu)
    counts: tuple[int | None, ...] = settings.threads
    if not counts:
        counts = (None,) if on_gpu else (await asyncio.to_thread(machine.own_threads),)
    rows: list[Row] = []
    notes: list[str] = []
    loads: list[Load] = []
    allocations: dict[int, int] = {}
    for threads in counts:
        ours = Ours(settings, threads, load)
        theirs = llamacpp.other_side(settings, threads)
        trial = _Trial(settings, threads, ours, theirs, notes, say)
        samples = await trial.run()
        rows += (_row(threads, workload, samples) for workload in settings.workloads)
        if settings.reload:
            say("loads it again")
            await ours.open()
            await ours.close()
        if ours.preempted:
            notes.append(f"{ours.preempted} times a sequence had to wait for K/V blocks")
        loads += ours.loads
        allocations |= trial.allocations
    assert ours.info is not None
    info, build = ours.info, "" if theirs is None else theirs.build
    ran_on = await asyncio.to_thread(_ran_on, settings, info, build)
    notes += (note for note in info.backend_notes if note not in ran_on.get("GPU", ""))
    if theirs is not None:
        flags = await asyncio.to_thread(machine.cpu_value, "flags")
        missing = llamacpp.unused_features(theirs.built_with, flags)
        if missing:
            notes.append(
                f"this build of llama.cpp makes no use of {', '.join(missing)}, which the CPU has; "
                "one built for this machine may be faster"
            )
    say("reads memory")
    named = [count for count in counts if count is not None]
    return Report(
        ran_on,
        tuple(rows),
        tuple(dict.fromkeys(notes)),
        loads=tuple(loads),
        read_ceilings=await asyncio.to_thread(read_ceilings, info.device, named),
        weights_bytes=info.weights_bytes,
        allocations=allocations,
    )


def _suited(settings: Settings, on_gpu: bool) -> Settings:
    """The settings for a device, where they leave open what to measure."""
    if not on_gpu:
        if settings.allocations:
            raise BenchError("allocations: counted on a GPU only")
        return settings
    if settings.llamacpp is not None:
        raise BenchError('device: llama.cpp is measured on the CPU; compare with device "cpu"')
    if settings.chosen:
        return settings
    return replace(settings, batches=GPU_BATCHES, prompts=GPU_PROMPTS)


def _row(threads: int | None, workload: Workload, samples: Samples) -> Row:
    ours, theirs = (samples.get((name, workload)) for name in (Ours.name, llamacpp.LLAMACPP))
    assert ours
    first = [each.first_token_s * 1e3 for each in ours if each.first_token_s is not None]
    host = [each.host_s * 1e6 for each in ours if each.host_s is not None]
    return Row(
        threads,
        workload,
        Figures(tuple(each.speed for each in ours)),
        Figures(tuple(each.speed for each in theirs)) if theirs else None,
        first_token_ms=Figures(tuple(first)) if first else None,
        host_us=Figures(tuple(host)) if host else None,
    )


class _Trial:
    """The rounds at one number of threads: ours, theirs, ours, theirs."""

    def __init__(
        self,
        settings: Settings,
        threads: int | None,
        ours: Ours,
        theirs: Side | None,
        notes: list[str],
        say: Say,
    ) -> None:
        self.sides: list[Side] = [ours] if theirs is None else [ours, theirs]
        self.allocations: dict[int, int] = {}
        self._settings = settings
        self._threads = threads
        self._ours = ours
        self._notes = notes
        self._say = say

    async def run(self) -> Samples:
        """What came of each round; an empty list where a side has no such workload."""
        samples: Samples = {
            (side.name, workload): []
            for side in self.sides
            for workload in self._settings.workloads
        }
        try:
            held = await self._open_all()
            for number in range(1, self._settings.rounds + 1):
                for side in self.sides:
                    if not held:
                        await self._open(side)
                    for workload in self._settings.workloads:
                        self._tell(f"round {number}, {side.name}, {workload.label}")
                        sample = await side.measure(workload, self._prompts(workload, number))
                        if sample is not None:
                            samples[side.name, workload].append(sample)
                    if not held:
                        await side.close()
            for workload in self._settings.allocation_workloads:
                self._tell(f"allocations, {workload.label}")
                for number in (0, 1):  # the first of the two warms up
                    prompts = self._prompts(workload, number)
                    count = await self._ours.allocations(workload, prompts)
                self.allocations[workload.sequences] = count
        finally:
            for side in self.sides:
                await side.close()
        return samples

    async def _open_all(self) -> bool:
        """Open and warm up all sides; whether they stay open, which is the fairer comparison."""
        for side in self.sides:
            if side is not self._ours and not await asyncio.to_thread(self._has_room):
                return await self._reopen("memory is too small for both engines at once")
            await self._open(side)
        if len(self.sides) > 1:
            before = time.process_time()
            await asyncio.sleep(IDLE_S)
            if time.process_time() - before > IDLE_S * IDLE_CORES:
                return await self._reopen("an idle engine does not leave the cores alone")
        return True

    async def _reopen(self, why: str) -> bool:
        self._notes.append(f"{why}: each was opened anew for each round")
        for side in self.sides:
            await side.close()
        return False

    def _has_room(self) -> bool:
        from asyncllm.kv.pool import available_bytes

        assert self._ours.info is not None
        size = self._ours.info.weights_bytes  # a split set has more files than one
        if self._settings.llamacpp_model is not None:
            size = self._settings.llamacpp_model.stat().st_size
        return available_bytes() > MEMORY_OF_FILE * size

    async def _open(self, side: Side) -> None:
        self._tell(f"{side.name} opens and warms up")
        await side.open()
        if not side.warms_up:
            return
        for workload in self._settings.workloads:
            tokens = WARM_UP_TOKENS + stagger(workload.sequences)
            short = replace(workload, tokens=min(workload.tokens, tokens))
            for number in range(WARM_UP_PROMPTS if workload.kind == "prompt" else 1):
                # So few tokens may come all at once; nothing is made of their figure.
                with suppress(NoWindowError):
                    await side.measure(short, self._prompts(short, -number))

    def _tell(self, what: str) -> None:
        threads = self._threads
        where = "" if threads is None else f"{threads} thread{'s' * (threads > 1)}: "
        self._say(where + what)

    def _prompts(self, workload: Workload, number: int) -> Prompts:
        return workload.prompts(self._ours.vocabulary, self._ours.excluded, number)


def _ran_on(settings: Settings, info: ModelInfo, build: str) -> dict[str, str]:
    formats = ", ".join(f"{name} ({count})" for name, count in info.formats.items())
    out = {
        "model": f"{info.name}, {settings.model.name}",
        "weights": f"{info.architecture}, {info.parameters / 1e6:,.1f} million, "
        f"{info.weights_bytes / 1e6:,.1f} MB, {formats}",
    }
    if settings.llamacpp is not None:
        file = settings.llamacpp_model or settings.model
        out["llama.cpp"] = f"{build}, {file.name}"
    asked = ", deterministic" if settings.options.deterministic and info.deterministic else ""
    return (
        out
        | {"backend": f"{info.backend}, activations {info.dtype}, K/V {info.kv_dtype}{asked}"}
        | machine.described(info.device)
        | {"rounds": f"{settings.rounds}, in turns"}
    )
