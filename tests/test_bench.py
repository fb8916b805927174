"""Measuring speed: what is counted, in which order, and how it is told."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from asyncllm import AsyncEngine, EngineOptions, bench, cli
from asyncllm.bench import (
    BenchError,
    Figures,
    Load,
    Report,
    Row,
    Settings,
    Workload,
    machine,
    measure,
)
from asyncllm.bench import llamacpp as other
from asyncllm.bench.workload import Prompts, Sample
from asyncllm.info import LoadStage
from scripts import quantise_q4_0
from tests.fake_engine import FakeModel

ONE = Workload("one", 1, 16, 33)
MANY = Workload("many", 4, 16, 8)
PROMPT = Workload("prompt", 1, 64, 1)

LLAMA_BENCH = """[
  {
    "build_commit": "abc1234", "build_number": 4321, "cpu_info": "Some CPU", "backends": "CPU",
    "model_filename": "model.gguf", "model_type": "llama 135M Q4_0", "n_batch": 2048,
    "n_threads": 2, "type_k": "f16", "n_prompt": 512, "n_gen": 0, "n_depth": 0,
    "avg_ns": 1024000000, "stddev_ns": 0, "avg_ts": 500.0, "stddev_ts": 0.0,
    "samples_ns": [ 1024000000 ], "samples_ts": [ 500.0 ]
  },
  {
    "build_commit": "abc1234", "build_number": 4321, "cpu_info": "Some CPU", "backends": "CPU",
    "model_filename": "model.gguf", "model_type": "llama 135M Q4_0", "n_batch": 2048,
    "n_threads": 2, "type_k": "f16", "n_prompt": 0, "n_gen": 128, "n_depth": 0,
    "avg_ns": 2000000000, "stddev_ns": 0, "avg_ts": 64.0, "stddev_ts": 0.0,
    "samples_ns": [ 2000000000 ], "samples_ts": [ 64.0 ]
  }
]
"""


class Models:
    """Loads fake models, and keeps them to be looked at."""

    def __init__(self) -> None:
        self.loaded: list[FakeModel] = []
        self.options: list[EngineOptions] = []

    def __call__(self, model: Path, options: EngineOptions) -> Awaitable[AsyncEngine]:
        self.options.append(options)
        self.loaded.append(FakeModel(step_s=0.001))
        return self.loaded[-1].load()


class OtherSide:
    """Stands for llama.cpp: says what is asked of it, and makes twice as much each time."""

    name = other.LLAMACPP
    warms_up = False
    build = "other 1"
    built_with = ""

    def __init__(self, spins: bool = False) -> None:
        self.calls: list[str] = []
        self._spins = spins
        self._closed = threading.Event()

    async def open(self) -> None:
        self.calls.append("open")
        self._closed.clear()
        if self._spins:
            threading.Thread(target=self._spin).start()

    def _spin(self) -> None:
        while not self._closed.is_set():
            pass

    async def close(self) -> None:
        self.calls.append("close")
        self._closed.set()

    async def measure(self, workload: Workload, prompts: Prompts) -> Sample | None:
        self.calls.append(workload.kind)
        assert [len(prompt) for prompt in prompts] == [workload.prompt_tokens] * workload.sequences
        if workload.kind == "many":
            return None
        return Sample(float(self.calls.count(workload.kind)))


def small(*threads: int) -> Settings:
    return Settings(
        model=Path("some/model.gguf"),
        threads=threads,
        rounds=2,
        tokens=6,
        sequences=3,
        prompt_tokens=40,
    )


async def run(
    settings: Settings, models: Models, say: Callable[[str], None] = lambda line: None
) -> Report:
    return await bench.bench(
        settings, load=models, say=say, read_ceilings=lambda device, threads: {device: 1e9}
    )


def versus(monkeypatch: pytest.MonkeyPatch, side: OtherSide) -> Settings:
    monkeypatch.setattr(other, "other_side", lambda settings, threads: side)
    return small(1)


async def test_every_workload_has_a_figure_for_each_round_and_number_of_threads() -> None:
    models, said = Models(), list[str]()
    settings = small(1, 2)
    report = await run(settings, models, said.append)
    assert [(row.threads, row.workload.kind) for row in report.rows] == [
        (threads, kind) for threads in (1, 2) for kind in ("one", "many", "prompt")
    ]
    for row in report.rows:
        assert len(row.ours.rounds) == 2
        assert min(row.ours.rounds) > 0
        assert row.theirs is None and row.ratio is None
    assert [options.threads for options in models.options] == [1, 2]
    assert all(options.max_seqs == 3 for options in models.options)
    assert "2 threads: round 2, asyncllm, prompt of 40 tokens" in said
    assert "model.gguf" in report.ran_on["model"]
    assert report.ran_on["backend"].startswith("fake")


async def test_no_prompt_is_answered_by_a_cache() -> None:
    models = Models()
    settings = small(1)
    await run(settings, models)
    asked = [
        each.sequences * each.prompt_tokens * (settings.rounds + warm_ups)
        for each, warm_ups in zip(settings.workloads, (1, 1, measure.WARM_UP_PROMPTS), strict=True)
    ]
    assert models.loaded[0].runner.prompt_tokens_computed == sum(asked)


def test_prompts_differ_by_round_and_sequence_and_come_again() -> None:
    first, second = (MANY.prompts(range(1000), frozenset({7}), number) for number in (1, 2))
    assert first == MANY.prompts(range(1000), frozenset({7}), 1)
    assert len({tuple(prompt) for prompt in (*first, *second)}) == 2 * MANY.sequences
    assert all(7 not in prompt for prompt in MANY.prompts(range(6, 9), frozenset({7}), 0))


async def test_both_sides_take_turns_and_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    side, models = OtherSide(), Models()
    settings = versus(monkeypatch, side)
    said: list[str] = []
    report = await run(settings, models, said.append)
    assert side.calls == ["open", *["one", "many", "prompt"] * 2, "close"]
    turns = [line.split(", ")[:2] for line in said if "round" in line]
    order = [tuple(turn) for turn in turns[::3]]
    assert order == [
        (f"1 thread: round {number}", name)
        for number in (1, 2)
        for name in ("asyncllm", "llama.cpp")
    ]
    assert len(models.loaded) == 1
    assert report.notes == ()
    one, many, _ = report.rows
    assert one.theirs is not None and one.theirs.rounds == (1.0, 2.0)
    assert one.ratio == pytest.approx(one.ours.median / 1.5)
    assert many.theirs is None


async def test_both_sides_are_reopened_where_memory_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncllm.kv.pool.available_bytes", lambda: 0)
    side, models = OtherSide(), Models()
    report = await run(versus(monkeypatch, side), models)
    turn = ["open", "one", "many", "prompt", "close"]
    assert side.calls == ["close", *turn, *turn, "close"]
    assert len(models.loaded) == 3
    assert all(model.runner.closed for model in models.loaded)
    assert any("memory" in note for note in report.notes)


async def test_a_side_that_spins_while_idle_is_not_held_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = OtherSide(spins=True)
    report = await run(versus(monkeypatch, side), Models())
    assert side.calls.count("open") == 3
    assert any("idle" in note for note in report.notes)


async def test_what_fails_in_a_round_closes_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(OtherSide):
        async def measure(self, workload: Workload, prompts: Prompts) -> Sample | None:
            raise BenchError("it fell over")

    side, models = Failing(), Models()
    with pytest.raises(BenchError, match="it fell over"):
        await run(versus(monkeypatch, side), models)
    assert side.calls[-1] == "close"
    assert models.loaded[0].runner.closed


def timings(prompt: int = 16, predicted: int = 33) -> dict[str, Any]:
    return {
        "prompt_n": prompt,
        "prompt_ms": 128.0,
        "predicted_n": predicted,
        "predicted_ms": 1000.0,
        "predicted_per_second": 33.0,
    }


def test_the_servers_first_token_counts_for_the_prompt_alone() -> None:
    assert other.server_speed(ONE, [timings()], 2.0) == 32.0
    assert other.server_speed(PROMPT, [timings(64, 1)], 2.0) == 500.0
    assert other.server_speed(MANY, [timings(16, 8)] * 4, 2.0) == 16.0


def test_a_server_that_did_other_work_is_not_compared() -> None:
    with pytest.raises(BenchError, match="made 20 tokens; 33"):
        other.server_speed(ONE, [timings(predicted=20)], 2.0)
    with pytest.raises(BenchError, match="computed 3 tokens of prompts"):
        other.server_speed(ONE, [timings(prompt=3)], 2.0)


def test_figures_are_found_in_the_output_of_llama_bench() -> None:
    assert other.parse_llama_bench(LLAMA_BENCH, 512, 0) == (500.0, "4321 (abc1234)")
    assert other.parse_llama_bench(LLAMA_BENCH, 0, 128)[0] == 64.0
    with pytest.raises(BenchError, match="n_prompt=64, n_gen=0"):
        other.parse_llama_bench(LLAMA_BENCH, 64, 0)
    for text in ("", "usage: llama-bench", '[{"n_prompt": 512}]', "[1]", '{"n_gen": 1}', "3"):
        with pytest.raises(BenchError, match="expected a list of tests"):
            other.parse_llama_bench(text, 512, 0)


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(0o755)
    return path


async def test_llama_bench_runs_once_for_each_figure(tmp_path: Path) -> None:
    body = f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    executable = program(tmp_path / "llama-bench", f"{body}print('''{LLAMA_BENCH}''')")
    side = other.LlamaBench(executable, Path("model.gguf"), 2)
    assert await side.measure(Workload("prompt", 1, 512, 1), []) == Sample(500.0)
    assert await side.measure(Workload("one", 1, 16, 128), []) == Sample(64.0)
    assert await side.measure(MANY, []) is None
    assert side.build == "llama-bench, build 4321 (abc1234)"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.partition(" -r ")[0] for call in calls] == ["-m model.gguf -t 2 -ngl 0"] * 2
    assert [call.partition(" -p ")[2] for call in calls] == ["512 -n 0", "0 -n 128"]


async def test_a_llama_bench_that_fails_is_quoted(tmp_path: Path) -> None:
    body = "print('loading', file=sys.stderr)\nsys.exit('error: failed to load model')"
    side = other.LlamaBench(program(tmp_path / "llama-bench", body), Path("model.gguf"), 1)
    with pytest.raises(BenchError, match=r"ended with 1: error: failed to load model"):
        await side.measure(ONE, [])


def test_instruction_sets_that_llamacpp_leaves_unused_are_named() -> None:
    info = "CPU : SSE3 = 1 | AVX2 = 1 | F16C = 1 | OPENMP = 1 | "
    assert other.unused_features(info, "sse avx2 avx512f") == ["AVX512"]
    assert other.unused_features(info, "sse avx2 fma") == []
    assert other.unused_features("", "sse avx2 avx512f") == []


def test_figures_are_told_with_ranges_and_ratios() -> None:
    compared = Row(2, ONE, Figures((30.0, 10.0, 20.0)), Figures((10.0, 10.0, 5.0)))
    alone = Row(2, MANY, Figures((40.0, 40.0, 40.0)))
    report = Report({"CPU": "some", "model": "m"}, (compared, alone), ("it rained",))
    assert report.lines() == [
        "CPU    some",
        "model  m",
        "note   it rained",
        "",
        "tokens/s, median (min..max)            asyncllm           llama.cpp         ratio",
        "threads 2: 1 sequence, 33 tokens       20.0 (10.0..30.0)  10.0 (5.0..10.0)  "
        "2.00 (1.00..4.00)",
        "threads 2: 4 sequences, 8 tokens each  40.0 (40.0..40.0)  -                 -",
    ]
    first, second = json.loads(json.dumps(report.as_dict()))["tokens_per_second"]
    assert first["asyncllm"] == {
        "median": 20.0,
        "min": 10.0,
        "max": 30.0,
        "rounds": [30.0, 10.0, 20.0],
    }
    assert (first["ratio"], first["ratio_min"], first["ratio_max"]) == (2.0, 1.0, 4.0)
    assert second["llamacpp"] is None
    without = Report({"CPU": "some"}, (alone,), ()).lines()
    assert "llama.cpp" not in without[-2]


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["bench", *arguments]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    return told.err


def test_a_missing_llamacpp_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    none = str(tmp_path / "none.gguf")

    def not_found(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(other, "find_spec", not_found)
    assert "pip install xllamacpp" in failure(capsys, none, "--vs-llamacpp")
    assert "expected is a llama-bench" in failure(capsys, none, "--vs-llamacpp", str(tmp_path))
    assert "expected is a llama-bench" in failure(capsys, none, "--vs-llamacpp", none)
    executable = program(tmp_path / "llama-bench", "")
    second = str(tmp_path / "other.gguf")
    told = failure(capsys, none, "--vs-llamacpp", str(executable), "--llamacpp-model", second)
    assert "other.gguf" in told
    assert "none.gguf" in failure(capsys, none, "--vs-llamacpp", str(executable))


def test_settings_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rounds=0" in failure(capsys, "m.gguf", "--rounds", "0")
    assert "tokens=1" in failure(capsys, "m.gguf", "--tokens", "1")
    assert "sequences=0" in failure(capsys, "m.gguf", "--sequences", "0")
    assert "prompt_tokens=-3" in failure(capsys, "m.gguf", "--prompt-tokens=-3")
    assert "threads=[1, 0]" in failure(capsys, "m.gguf", "--threads", "1,0")
    assert "no comparison" in failure(capsys, "m.gguf", "--llamacpp-model", "other.gguf")
    assert "batches=[8, 0]" in failure(capsys, "m.gguf", "--batches", "8,0")
    assert "depths=[-1]" in failure(capsys, "m.gguf", "--depths=-1")
    assert "prompts=[0]" in failure(capsys, "m.gguf", "--prompts", "0")
    assert "sequences: " in failure(capsys, "m.gguf", "--batches", "8", "--sequences", "4")
    assert "prompt_tokens: " in failure(capsys, "m.gguf", "--prompts", "8", "--prompt-tokens", "4")
    assert "batches, depths: " in failure(capsys, "m.gguf", "--vs-llamacpp", "--depths", "4")
    assert "model: " in failure(capsys)
    assert "model: " in failure(capsys, "m.gguf", "--synthetic", "tiny-q4_k_m")
    assert "keep: " in failure(capsys, "m.gguf", "--keep", "other.gguf")
    assert "accepted are llama-8b" in failure(capsys, "--synthetic", "tiny")
    assert "allocations: " in failure(capsys, "m.gguf", "--allocations", "--device", "cpu")
    with pytest.raises(SystemExit):
        cli.main(["bench", "m.gguf", "--threads", "two"])


def test_threads_are_given_as_a_list_or_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Settings] = []

    async def measured(settings: Settings, **_: object) -> Report:
        seen.append(settings)
        return Report({"CPU": "some"}, (Row(1, ONE, Figures((1.0,))),), ())

    monkeypatch.setattr(bench, "bench", measured)
    assert cli.main(["bench", "m.gguf", "--threads", "1,2", "--threads", "4", "--threads=2"]) == 0
    assert cli.main(["bench", "--json", "m.gguf"]) == 0
    assert [settings.threads for settings in seen] == [(1, 2, 4), ()]
    assert "33 tokens" in capsys.readouterr().out


async def test_what_is_measured_deterministic_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    async def measured(settings: Settings, **_: object) -> Report:
        seen.append(settings)
        return Report({"CPU": "some"}, (Row(1, ONE, Figures((1.0,))),), ())

    with monkeypatch.context() as patch:
        patch.setattr(bench, "bench", measured)
        for more in ([], ["--deterministic"]):
            assert await asyncio.to_thread(cli.main, ["bench", "m.gguf", *more]) == 0
    assert [settings.options.deterministic for settings in seen] == [False, True]
    for settings in seen:
        report = await run(replace(small(1), options=settings.options), Models())
        told = report.ran_on["backend"].endswith(", deterministic")
        assert told is settings.options.deterministic


def grid() -> Settings:
    return Settings(
        model=Path("some/model.gguf"),
        threads=(1,),
        rounds=2,
        tokens=6,
        batches=(1, 3),
        depths=(0, 40),
        prompts=(8, 24),
    )


async def test_batches_depths_and_prompts_are_measured_each() -> None:
    models = Models()
    report = await run(grid(), models)
    kinds = [(row.workload.kind, row.workload.sequences, row.workload.depth) for row in report.rows]
    assert kinds == [
        *(("decode", 1, 0), ("decode", 3, 0), ("decode", 1, 40), ("decode", 3, 40)),
        *(("prompt", 1, 0), ("prompt", 1, 0)),
    ]
    for row in report.rows:
        assert len(row.ours.rounds) == 2
        alone = row.workload.sequences == 1 and row.workload.depth == 0
        assert (row.first_token_ms is not None) == alone
        assert (row.host_us is not None) == (row.workload.kind == "decode")
    (options,) = models.options
    assert options.max_seqs == 3
    told = json.loads(json.dumps(report.as_dict()))
    assert [row["depth"] for row in told["tokens_per_second"]] == [0, 0, 40, 40, 0, 0]
    assert told["tokens_per_second"][0]["host_us_per_step"]["median"] > 0
    assert told["read_bytes_per_second"] == {"cpu": 1e9}
    assert len(told["loads"]) == 1


async def test_the_rate_of_a_batch_is_that_of_its_steps() -> None:
    class Slow(Models):
        def __call__(self, model: Path, options: EngineOptions) -> Awaitable[AsyncEngine]:
            self.loaded.append(FakeModel(step_s=0.01))
            return self.loaded[-1].load()

    settings = Settings(model=Path("m.gguf"), threads=(1,), rounds=1, tokens=20, batches=(1, 4))
    one, four, _ = (await run(settings, Slow())).rows
    assert one.host_us is not None and one.host_us.median < 10_000
    # A step takes 10 ms and what the machine adds.
    assert 50 < one.ours.median <= 101
    assert 2 * one.ours.median < four.ours.median <= 404


async def test_a_depth_is_computed_once_and_not_timed() -> None:
    models = Models()
    settings = replace(grid(), batches=(3,), depths=(40,), prompts=(8,), rounds=4)
    await run(settings, models)
    computed = models.loaded[0].runner.prompt_tokens_computed
    prompts = 8 * (settings.rounds + measure.WARM_UP_PROMPTS)
    block = 4  # of the last block of each, in either run of each round
    assert computed - prompts <= 3 * 40 + 2 * 3 * block * (settings.rounds + 1)


async def test_a_batch_that_never_runs_at_once_is_an_error() -> None:
    class Narrow(Models):
        def __call__(self, model: Path, options: EngineOptions) -> Awaitable[AsyncEngine]:
            self.loaded.append(FakeModel(max_seqs=2))
            return self.loaded[-1].load()

    settings = Settings(model=Path("m.gguf"), threads=(1,), batches=(3,))
    with pytest.raises(BenchError, match="first of 3 sequences had ended before"):
        await run(settings, Narrow())


async def test_a_second_load_is_timed_when_asked_for() -> None:
    models = Models()
    report = await run(replace(small(1), reload=True), models)
    assert len(models.loaded) == len(report.loads) == 2
    assert all(load.seconds > 0 and load.threads == 1 for load in report.loads)
    assert all(model.runner.closed for model in models.loaded)


async def test_a_gpu_is_measured_more_widely_unless_something_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "on_gpu", lambda options: True)
    settings = Settings(model=Path("m.gguf"), rounds=1)
    suited = measure._suited(settings, True)
    assert [each.sequences for each in suited.workloads] == [1, 8, 32, 64, 1, 1]
    assert measure._suited(settings, False) is settings
    chosen = replace(settings, sequences=2, tokens=4)
    report = await run(chosen, Models())
    assert [row.label for row in report.rows][:1] == ["1 sequence, 4 tokens"]
    with pytest.raises(BenchError, match="device: "):
        await run(replace(settings, llamacpp=sys.executable), Models())


def test_more_columns_and_lines_stand_where_there_is_something_to_say() -> None:
    decode = Workload.decode(2, 64, 8)
    row = Row(None, decode, Figures((4.0,)), host_us=Figures((250.0, 150.0)))
    prompt = Row(None, PROMPT, Figures((9.0,)), first_token_ms=Figures((1.25,)))
    load = Load(None, 1.5, (LoadStage("weights", 1.25),))
    report = Report(
        {"GPU": "some"}, (row, prompt), (), (load,), {"cuda:0": 4e12}, 2_000_000_000, {1: 0}
    )
    assert report.lines() == [
        "GPU          some",
        "load         1.50 s: weights 1.25",
        "read         4,000.0 GB/s, cuda:0; all weights in 0.50 ms",
        "allocations  0 while a batch of 1 decoded",
        "",
        "tokens/s, median (min..max)  asyncllm        first token, ms  host, us a step",
        "batch 2, depth 64            4.0 (4.0..4.0)  -                200 (150..250)",
        "prompt of 64 tokens          9.0 (9.0..9.0)  1.2 (1.2..1.2)   -",
    ]


def test_memory_is_read_by_one_thread_and_by_as_many_as_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "CPU_READ_BYTES", 1 << 24)
    found = machine.read_ceilings("cpu", [2])
    assert list(found) == ["1 thread", "2 threads"]
    assert all(1e8 < speed < 1e13 for speed in found.values())


def test_a_made_checkpoint_is_measured_and_may_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CPU_READ_BYTES", 1 << 24)
    kept = tmp_path / "kept.gguf"
    # Tokens enough that this thread sees some of a model this small before it has them all.
    few = "--threads 1 --rounds 1 --tokens 300 --batches 1,2 --depths 0,24 --prompts 16"
    command = ["bench", "--synthetic", "tiny-q4_k_m", "--keep", str(kept), *few.split()]
    command += ["--device", "cpu", "--json"]
    assert cli.main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ran_on"]["model"].startswith("tiny-q4_k_m")
    rows = told["tokens_per_second"]
    assert [row["workload"] for row in rows] == ["decode"] * 4 + ["prompt"]
    assert all(row["asyncllm"]["median"] > 0 for row in rows)
    assert "weights" in told["loads"][0]["stages"]
    assert set(told["read_bytes_per_second"]) == {"1 thread"}
    written = kept.stat().st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == ["kept.gguf"]
    assert cli.main(command) == 0
    assert kept.stat().st_mtime_ns == written
    capsys.readouterr()
    told = failure(capsys, "--synthetic", "llama-1b-q4_k_m", "--keep", str(kept))
    assert "is 'tiny-q4_k_m', not 'llama-1b-q4_k_m'" in told
    missing = str(tmp_path / "none" / "kept.gguf")
    assert "cannot be written" in failure(capsys, "--synthetic", "tiny-q4_k_m", "--keep", missing)


@pytest.mark.real_model
def test_bench_compares_a_real_model_with_llamacpp(smollm2_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    few = "--threads 1 --rounds 1 --tokens 4 --sequences 2 --prompt-tokens 8"
    command = ["bench", str(smollm2_path), *few.split(), "--vs-llamacpp", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "asyncllm", *command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "xllamacpp 2" in told["ran_on"]["llama.cpp"]
    assert [row["workload"] for row in told["tokens_per_second"]] == ["one", "many", "prompt"]
    for row in told["tokens_per_second"]:
        assert row["asyncllm"]["median"] > 0
        assert row["ratio"] == row["asyncllm"]["median"] / row["llamacpp"]["median"]


def test_matrices_are_written_again_in_q4_0(tmp_path: Path) -> None:
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    chance = np.random.default_rng(0)
    types = gguf.GGMLQuantizationType
    weights = {
        "token_embd.weight": (chance.standard_normal((8, 64)), types.Q5_1),
        "blk.0.attn_q.weight": (chance.standard_normal((32, 64)), types.Q4_1),
        "blk.0.ffn_up.weight": (chance.standard_normal((32, 64)), types.F16),
        "blk.0.ffn_gate_inp.weight": (chance.standard_normal((4, 64)), types.F32),
        "blk.0.odd.weight": (chance.standard_normal((4, 24)), types.F16),
        "blk.0.attn_norm.weight": (chance.standard_normal(64), types.F32),
    }
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_name("small")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    for name, (values, kind) in weights.items():
        data = gguf.quants.quantize(values.astype(np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    assert quantise_q4_0.write_q4_0(source, target) == {"Q5_1": 1, "Q4_0": 2, "F32": 2, "F16": 1}
    copy = gguf.GGUFReader(target)
    assert copy.fields["general.name"].contents() == "small"
    assert copy.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert copy.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    made = {tensor.name: tensor for tensor in copy.tensors}
    assert list(made) == list(weights)
    for name, (values, kind) in weights.items():
        tensor = made[name]
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert plain.shape == values.shape
        assert np.abs(plain - values).max() < 0.5
        changed = name in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight")
        assert tensor.tensor_type == (types.Q4_0 if changed else kind)

    quantise_q4_0.write_q4_0(source, target, head_q8_0=True)
    assert gguf.GGUFReader(target).tensors[0].tensor_type == types.Q8_0
