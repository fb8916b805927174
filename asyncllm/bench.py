"""How fast a model runs here, end to end through the public API, and beside llama.cpp."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from asyncllm.engine import AsyncEngine
from asyncllm.errors import AsyncLLMError
from asyncllm.info import ModelInfo
from asyncllm.options import EngineOptions
from asyncllm.version import __version__

LLAMACPP: Final = "llama.cpp"
SHORT_PROMPT: Final = 16  # tokens before the outputs that are timed
WARM_UP_TOKENS: Final = 16
WARM_UP_PROMPTS: Final = 4  # by then the size of prompt chunks is learned
IDLE_S: Final = 0.5
IDLE_CORES: Final = 0.05  # more of a core than this, and idle threads spin
MEMORY_OF_FILE: Final = 2  # an engine takes at most about the mapped file and a repacked copy
REQUEST_TIMEOUT_S: Final = 3600

# Flags of /proc/cpuinfo, and what llama.cpp calls its use of them.
FEATURES: Final = {
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "amx_int8": "AMX_INT8",
}

Kind = Literal["one", "many", "prompt"]
Say = Callable[[str], None]
Load = Callable[[Path, EngineOptions], Awaitable[AsyncEngine]]
Prompts = Sequence[Sequence[int]]


class BenchError(AsyncLLMError):
    """Something cannot be measured; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is timed.

    Attributes:
        kind: `"one"`: tokens of one sequence after its first, over the time after its first;
            `"many"`: all tokens of several sequences, over the time from the submission of all to
            the end of the last; `"prompt"`: a prompt's tokens, over the time from its submission
            to the first token.
        sequences: that run at once.
        prompt_tokens: of each.
        tokens: output tokens of each.
    """

    kind: Kind
    sequences: int
    prompt_tokens: int
    tokens: int

    @property
    def label(self) -> str:
        """For a table."""
        return {
            "one": f"1 sequence, {self.tokens} tokens",
            "many": f"{self.sequences} sequences, {self.tokens} tokens each",
            "prompt": f"prompt of {self.prompt_tokens} tokens",
        }[self.kind]

    def prompts(self, vocabulary: range, excluded: frozenset[int], number: int) -> Prompts:
        """Random ids: others for each number, the same again for the same."""
        chance = random.Random(f"{self} {number}")
        allowed = [token for token in vocabulary if token not in excluded]
        return [chance.choices(allowed, k=self.prompt_tokens) for _ in range(self.sequences)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        model: the checkpoint.
        threads: measure with each of these numbers; empty: the engine's own choice.
        rounds: times that each workload is timed.
        tokens: of one sequence; each of many gets half as many.
        sequences: at once; 1 leaves that row out.
        prompt_tokens: of the long prompt.
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
    sequences: int = 8
    prompt_tokens: int = 512
    llamacpp: str | None = None
    llamacpp_model: Path | None = None
    options: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("tokens", 2), ("sequences", 1), ("prompt_tokens", 1)):
            value = getattr(self, name)
            if value < least:
                raise BenchError(f"{name}={value}: accepted is a whole number from {least}")
        if any(count < 1 for count in self.threads):
            raise BenchError(f"threads={list(self.threads)}: accepted are whole numbers from 1")
        if self.llamacpp_model is not None and self.llamacpp is None:
            raise BenchError("a model for llama.cpp is given, and no comparison is asked for")

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """In the order in which they are timed."""
        one = Workload("one", 1, SHORT_PROMPT, self.tokens)
        many = Workload("many", self.sequences, SHORT_PROMPT, self.tokens // 2)
        prompt = Workload("prompt", 1, self.prompt_tokens, 1)
        return (one, many, prompt) if self.sequences > 1 else (one, prompt)

    @property
    def context_length(self) -> int:
        """Tokens that the longest of them needs."""
        return max(each.prompt_tokens + each.tokens for each in self.workloads) + 1


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second of one workload on one side, a value for each round."""

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
        low, high = min(self.rounds), max(self.rounds)
        return f"{self.median:.1f} ({low:.1f}..{high:.1f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One workload at one number of threads; `theirs` is `None` where there is nothing to say."""

    threads: int
    workload: Workload
    ours: Figures
    theirs: Figures | None = None

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
            "prompt_tokens": self.workload.prompt_tokens,
            "tokens": self.workload.tokens,
            "asyncllm": self.ours.as_dict(),
            "llamacpp": None if self.theirs is None else self.theirs.as_dict(),
            "ratio": self.ratio,
            "ratio_min": None if ratios is None else min(ratios.rounds),
            "ratio_max": None if ratios is None else max(ratios.rounds),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, and on what.

    Attributes:
        ran_on: label to value: model, machine, versions.
        rows: the figures, tokens per second.
        notes: what a reader should know of how they came about.
    """

    ran_on: dict[str, str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [row.as_dict() for row in self.rows]
        return {"ran_on": self.ran_on, "tokens_per_second": rows, "notes": list(self.notes)}

    def lines(self) -> list[str]:
        """As text."""
        compared = any(row.theirs is not None for row in self.rows)
        width = max(len(label) for label in self.ran_on)
        out = [f"{label:{width}}  {value}" for label, value in self.ran_on.items()]
        out += [f"{'note':{width}}  {note}" for note in self.notes]
        heads = ["tokens/s, median (min..max)", "asyncllm"]
        cells = [heads + ["llama.cpp", "ratio"] * compared]
        for row in self.rows:
            line = [f"threads {row.threads}: {row.workload.label}", str(row.ours)]
            if compared:
                line += ["-", "-"] if row.theirs is None else [str(row.theirs), _ratio(row)]
            cells.append(line)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        out.append("")
        for line in cells:
            padded = (cell.ljust(size) for cell, size in zip(line, widths, strict=True))
            out.append("  ".join(padded).rstrip())
        return out


def _ratio(row: Row) -> str:
    assert row.ratios is not None
    return f"{row.ratio:.2f} ({min(row.ratios.rounds):.2f}..{max(row.ratios.rounds):.2f})"


class Side(Protocol):
    """An engine that is timed. `close` is idempotent; after it `open` may come again."""

    name: str
    warms_up: bool

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def measure(self, workload: Workload, prompts: Prompts) -> float | None:
        """Tokens per second, or `None` where it has no such workload."""


class Ours:
    """This library, called as an application calls it."""

    name = "asyncllm"
    warms_up = True

    def __init__(self, settings: Settings, threads: int, load: Load) -> None:
        self._model = settings.model
        self._options = replace(
            settings.options,
            threads=threads,
            max_seqs=settings.sequences,
            context_length=settings.context_length,
        )
        self._load = load
        self._engine: AsyncEngine | None = None
        self.info: ModelInfo | None = None
        self.vocabulary = range(0)
        self.excluded: frozenset[int] = frozenset()

    async def open(self) -> None:
        engine = self._engine = await self._load(self._model, self._options)
        self.info = engine.info
        self.vocabulary = range(engine.tokenizer.vocab_size)
        self.excluded = frozenset(engine.tokenizer.eog_ids)

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    async def measure(self, workload: Workload, prompts: Prompts) -> float:
        assert self._engine is not None
        started = time.perf_counter()
        # Warm-up and rounds have prompts of their own; no cache is to be searched or filled either.
        generations = [
            self._engine.generate(
                prompt,
                prefix_cache=False,
                max_tokens=workload.tokens,
                temperature=0,
                repetition_penalty=1.0,
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        done = await asyncio.gather(*(generation.result() for generation in generations))
        seconds = time.perf_counter() - started
        tokens = sum(completion.usage.completion_tokens for completion in done)
        _check_tokens(self.name, tokens, workload)
        if workload.kind == "prompt":
            return workload.prompt_tokens / seconds
        if workload.kind == "many":
            return tokens / seconds
        # Not the times of chunks, which merge where the loop is late.
        timings = done[0].timings
        assert timings.first_token_s is not None
        return (tokens - 1) / (timings.total_s - timings.first_token_s)


def _check_tokens(name: str, tokens: int, workload: Workload) -> None:
    wanted = workload.sequences * workload.tokens
    if tokens != wanted:
        raise BenchError(f"{name} made {tokens} tokens; {wanted} were asked for")


class LlamaCppServer:
    """llama.cpp's server in this process, with its own defaults but for what makes it equal.

    One slot a sequence, which costs one sequence alone nothing; caches of prompts are off.
    """

    name = LLAMACPP
    warms_up = True

    def __init__(self, settings: Settings, model: Path, threads: int) -> None:
        self._model = model
        self._threads = threads
        self._sequences = settings.sequences
        self._context = -(-settings.context_length // 256) * 256  # of a slot, as it rounds itself
        self._server: Any = None
        self.build = f"xllamacpp {_version('xllamacpp')}"
        self.built_with = ""
        self._address = ""

    async def open(self) -> None:
        await asyncio.to_thread(self._start)

    async def close(self) -> None:
        await asyncio.to_thread(self._stop)

    async def measure(self, workload: Workload, prompts: Prompts) -> float:
        return await asyncio.to_thread(self._measure, workload, prompts)

    def _start(self) -> None:
        import xllamacpp

        self.built_with = xllamacpp.get_system_info()
        params = xllamacpp.CommonParams()
        params.model.path = str(self._model)
        params.n_parallel = self._sequences
        params.cont_batching = True
        params.n_ctx = self._context * self._sequences
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
        params.cache_ram_mib = params.n_ctx_checkpoints = params.verbosity = 0
        try:
            self._server = xllamacpp.Server(params)
        except (RuntimeError, OSError) as error:
            raise BenchError(f"llama.cpp cannot load {self._model}: {error}") from error
        self._address = self._server.listening_address.removeprefix("http://")

    def _stop(self) -> None:
        self._server = None  # which ends its threads

    def _measure(self, workload: Workload, prompts: Prompts) -> float:
        answers: list[dict[str, Any] | Exception] = []
        start = threading.Barrier(len(prompts) + 1)

        def ask(prompt: Sequence[int]) -> None:
            start.wait()
            try:
                answers.append(self._complete(prompt, workload.tokens))
            except Exception as error:  # raised below, on the thread that waits
                answers.append(error)

        # No pool: its threads would be started one by one as requests come.
        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        start.wait()
        started = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        timings = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise BenchError(f"llama.cpp did not answer: {answer}") from answer
            timings.append(answer["timings"])
        return server_speed(workload, timings, seconds)

    def _complete(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        import http.client

        body = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],  # the least that is greedy
            "repeat_penalty": 1.0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(self._address, timeout=REQUEST_TIMEOUT_S)
        with closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/completion", json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
        if response.status != 200:
            raise BenchError(f"status {response.status}, {text[:500].decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(text)
        return answer


def server_speed(workload: Workload, timings: Sequence[dict[str, Any]], seconds: float) -> float:
    """Tokens per second from what llama.cpp's server says of each request.

    Args:
        workload: that ran.
        timings: the `timings` of the answers.
        seconds: that all took together, as the caller saw it.

    Raises:
        BenchError: the token counts are not those that were asked for.
    """
    _check_tokens(LLAMACPP, sum(each["predicted_n"] for each in timings), workload)
    computed = sum(each["prompt_n"] for each in timings)
    if computed != workload.sequences * workload.prompt_tokens:
        raise BenchError(f"llama.cpp computed {computed} tokens of prompts, not all")
    if workload.kind == "prompt":
        return workload.prompt_tokens / (float(timings[0]["prompt_ms"]) / 1e3)
    if workload.kind == "one":
        # Its clock starts at the first token. Its own predicted_per_second counted that one too in
        # some versions.
        return (workload.tokens - 1) / (float(timings[0]["predicted_ms"]) / 1e3)
    return workload.sequences * workload.tokens / seconds


class LlamaBench:
    """llama.cpp's `llama-bench`: a process for each figure, which warms itself up."""

    name = LLAMACPP
    warms_up = False

    def __init__(self, executable: Path, model: Path, threads: int) -> None:
        self._command = [str(executable), "-m", str(model), "-t", str(threads), "-ngl", "0"]
        self.build = executable.name
        self.built_with = ""  # it does not say

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def measure(self, workload: Workload, prompts: Prompts) -> float | None:
        if workload.kind == "many":
            return None  # it has no parallel sequences
        prompt, tokens = (0, workload.tokens)
        if workload.kind == "prompt":
            prompt, tokens = workload.prompt_tokens, 0
        arguments = ["-r", "1", "-o", "json", "-p", str(prompt), "-n", str(tokens)]
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, told = await process.communicate()
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        if process.returncode != 0:
            last = told.decode(errors="replace").strip().rpartition("\n")[2]
            raise BenchError(f"{self._command[0]} ended with {process.returncode}: {last}")
        speed, build = parse_llama_bench(out.decode(errors="replace"), prompt, tokens)
        self.build = f"{Path(self._command[0]).name}, build {build}"
        return speed


def parse_llama_bench(text: str, prompt: int, tokens: int) -> tuple[float, str]:
    """Tokens per second, and the build, from the output of `llama-bench -o json`.

    Args:
        text: what it wrote to stdout.
        prompt: `n_prompt` of the test to take.
        tokens: its `n_gen`.

    Raises:
        BenchError: the test is not there.
    """
    try:
        tests = json.loads(text)
        for test in tests:
            if (test["n_prompt"], test["n_gen"]) == (prompt, tokens) and float(test["avg_ts"]) > 0:
                build = f"{test.get('build_number', '?')} ({test.get('build_commit', '?')})"
                return float(test["avg_ts"]), build
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{text[:100]!r}" if text.strip() else "nothing"
        raise BenchError(f"llama-bench -o json: expected a list of tests, found {found}") from error
    raise BenchError(f"llama-bench: no test with n_prompt={prompt}, n_gen={tokens} in its output")


async def bench(
    settings: Settings, *, load: Load = AsyncEngine.load, say: Say = lambda line: None
) -> Report:
    """Measure.

    Args:
        settings: what.
        load: makes our engine; for tests.
        say: told what is being done.

    Raises:
        BenchError: llama.cpp is not there, or fails.
        ModelLoadError: the model cannot be loaded.
    """
    await asyncio.to_thread(_check, settings)
    counts = settings.threads or (await asyncio.to_thread(_own_threads),)
    rows: list[Row] = []
    notes: list[str] = []
    for threads in counts:
        ours = Ours(settings, threads, load)
        theirs = _theirs(settings, threads)
        trial = _Trial(settings, threads, ours, theirs, notes, say)
        speeds = await trial.run()
        figures = {key: Figures(tuple(values)) for key, values in speeds.items() if values}
        for workload in settings.workloads:
            our_figures = figures[ours.name, workload.kind]
            their_figures = figures.get((LLAMACPP, workload.kind))
            rows.append(Row(threads, workload, our_figures, their_figures))
    assert ours.info is not None
    notes += ours.info.backend_notes
    if theirs is not None:
        missing = unused_features(theirs.built_with, await asyncio.to_thread(_cpu_value, "flags"))
        if missing:
            notes.append(
                f"this build of llama.cpp makes no use of {', '.join(missing)}, which the CPU has; "
                "one built for this machine may be faster"
            )
    build = "" if theirs is None else theirs.build
    ran_on = await asyncio.to_thread(_ran_on, settings, ours.info, build)
    return Report(ran_on, tuple(rows), tuple(dict.fromkeys(notes)))


def _check(settings: Settings) -> None:
    """Find out before a model is loaded what cannot work."""
    if settings.llamacpp is None:
        return
    if settings.llamacpp == "":
        if find_spec("xllamacpp") is None:
            raise BenchError(
                "llama.cpp is not here: pip install xllamacpp, or give --vs-llamacpp the path of a "
                "llama-bench"
            )
    elif not os.access(settings.llamacpp, os.X_OK) or Path(settings.llamacpp).is_dir():
        raise BenchError(f"{settings.llamacpp}: no program; expected is a llama-bench")
    model = settings.llamacpp_model
    if model is not None and not model.is_file():
        raise BenchError(f"{model}: no such file, for llama.cpp")


def unused_features(system_info: str, flags: str) -> list[str]:
    """Instruction sets that the CPU has and a build of llama.cpp does not use.

    Args:
        system_info: llama.cpp's own account, as in `CPU : AVX = 1 | AVX2 = 1`; empty: not known.
        flags: of /proc/cpuinfo; empty: not known.
    """
    if not system_info or not flags:
        return []
    used = {part.split("=")[0].split(":")[-1].strip() for part in system_info.split("|")}
    here = flags.split()
    return [name for flag, name in FEATURES.items() if flag in here and name not in used]


def _own_threads() -> int:
    from asyncllm.runner.threads import physical_cores

    return physical_cores()


def _theirs(settings: Settings, threads: int) -> LlamaCppServer | LlamaBench | None:
    model = settings.llamacpp_model or settings.model
    if settings.llamacpp is None:
        return None
    if settings.llamacpp == "":
        return LlamaCppServer(settings, model, threads)
    return LlamaBench(Path(settings.llamacpp), model, threads)


class _Trial:
    """The rounds at one number of threads: ours, theirs, ours, theirs."""

    def __init__(
        self,
        settings: Settings,
        threads: int,
        ours: Ours,
        theirs: Side | None,
        notes: list[str],
        say: Say,
    ) -> None:
        self.sides: list[Side] = [ours] if theirs is None else [ours, theirs]
        self._settings = settings
        self._threads = threads
        self._ours = ours
        self._notes = notes
        self._say = say

    async def run(self) -> dict[tuple[str, Kind], list[float]]:
        """Tokens per second of each round; an empty list where a side has no such workload."""
        speeds: dict[tuple[str, Kind], list[float]] = {
            (side.name, workload.kind): []
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
                        speed = await side.measure(workload, self._prompts(workload, number))
                        if speed is not None:
                            speeds[side.name, workload.kind].append(speed)
                    if not held:
                        await side.close()
        finally:
            for side in self.sides:
                await side.close()
        return speeds

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
            short = replace(workload, tokens=min(workload.tokens, WARM_UP_TOKENS))
            for number in range(WARM_UP_PROMPTS if workload.kind == "prompt" else 1):
                await side.measure(short, self._prompts(short, -number))

    def _tell(self, what: str) -> None:
        self._say(f"{self._threads} thread{'s' * (self._threads > 1)}: {what}")

    def _prompts(self, workload: Workload, number: int) -> Prompts:
        return workload.prompts(self._ours.vocabulary, self._ours.excluded, number)


def _ran_on(settings: Settings, info: ModelInfo, build: str) -> dict[str, str]:
    formats = ", ".join(f"{name} ({count})" for name, count in info.formats.items())
    out = {
        "model": f"{info.name}, {settings.model.name}",
        "weights": f"{info.architecture}, {info.parameters / 1e6:,.1f} million, {formats}",
    }
    if settings.llamacpp is not None:
        file = settings.llamacpp_model or settings.model
        out["llama.cpp"] = f"{build}, {file.name}"
    cpu = _cpu_value("model name") or platform.processor() or platform.machine()
    return out | {
        "CPU": f"{cpu}, {_cores()}",
        "backend": f"{info.backend}, activations {info.dtype}, K/V {info.kv_dtype}",
        "versions": f"asyncllm {__version__}, torch {_version('torch')}, "
        f"numba {_version('numba')}, Python {platform.python_version()}",
        "rounds": f"{settings.rounds}, in turns",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_value(wanted: str) -> str:
    """An entry of the first core in /proc/cpuinfo; empty where there is none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            label, _, value = line.partition(":")
            if label.strip() == wanted:
                return value.strip()
    except OSError:
        pass  # not Linux
    return ""


def _cores() -> str:
    if not hasattr(os, "sched_getaffinity"):
        return f"{os.cpu_count()} cores"
    numbers = sorted(os.sched_getaffinity(0))
    return f"core{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} of {os.cpu_count()}"
