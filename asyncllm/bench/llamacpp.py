"""llama.cpp, to compare with: its server in this process, or its `llama-bench`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from asyncllm.bench.machine import version
from asyncllm.bench.workload import BenchError, Prompts, Sample, Settings, Workload, check_tokens

LLAMACPP: Final = "llama.cpp"
REQUEST_TIMEOUT_S: Final = 3600

# Flags of /proc/cpuinfo, and what llama.cpp calls its use of them.
FEATURES: Final = {
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "amx_int8": "AMX_INT8",
}


def check(settings: Settings) -> None:
    """Find out before a model is loaded what cannot work.

    Raises:
        BenchError: naming it.
    """
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


def other_side(settings: Settings, threads: int | None) -> LlamaCppServer | LlamaBench | None:
    """What to compare with, if anything."""
    model = settings.llamacpp_model or settings.model
    if settings.llamacpp is None or threads is None:
        return None
    if settings.llamacpp == "":
        return LlamaCppServer(settings, model, threads)
    return LlamaBench(Path(settings.llamacpp), model, threads)


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


class LlamaCppServer:
    """llama.cpp's server in this process, with its own defaults but for what makes it equal.

    One slot a sequence, which costs one sequence alone nothing; caches of prompts are off.
    """

    name = LLAMACPP
    warms_up = True

    def __init__(self, settings: Settings, model: Path, threads: int) -> None:
        self._model = model
        self._threads = threads
        self._sequences = settings.max_seqs
        self._context = -(-settings.context_length // 256) * 256  # of a slot, as it rounds itself
        self._server: Any = None
        self.build = f"xllamacpp {version('xllamacpp')}"
        self.built_with = ""
        self._address = ""

    async def open(self) -> None:
        await asyncio.to_thread(self._start)

    async def close(self) -> None:
        await asyncio.to_thread(self._stop)

    async def measure(self, workload: Workload, prompts: Prompts) -> Sample:
        return Sample(await asyncio.to_thread(self._measure, workload, prompts))

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
    check_tokens(LLAMACPP, sum(each["predicted_n"] for each in timings), workload)
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

    async def measure(self, workload: Workload, prompts: Prompts) -> Sample | None:
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
        return Sample(speed)


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
