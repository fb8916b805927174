"""Measuring speed: what is counted, in which order, and how it is told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Awaitable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from asyncllm import AsyncEngine, EngineOptions, bench, cli
from asyncllm.bench import BenchError, Figures, Report, Row, Settings, Workload
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

    name = bench.LLAMACPP
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

    async def measure(self, workload: Workload, prompts: bench.Prompts) -> float | None:
        self.calls.append(workload.kind)
        assert [len(prompt) for prompt in prompts] == [workload.prompt_tokens] * workload.sequences
        return None if workload.kind == "many" else float(self.calls.count(workload.kind))


def small(*threads: int) -> Settings:
    return Settings(
        model=Path("some/model.gguf"),
        threads=threads,
        rounds=2,
        tokens=6,
        sequences=3,
        prompt_tokens=40,
    )


def versus(monkeypatch: pytest.MonkeyPatch, side: OtherSide) -> Settings:
    monkeypatch.setattr(bench, "_theirs", lambda settings, threads: side)
    return small(1)


async def test_every_workload_has_a_figure_for_each_round_and_number_of_threads() -> None:
    models, said = Models(), list[str]()
    settings = small(1, 2)
    report = await bench.bench(settings, load=models, say=said.append)
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
    await bench.bench(settings, load=models)
    asked = [
        each.sequences * each.prompt_tokens * (settings.rounds + warm_ups)
        for each, warm_ups in zip(settings.workloads, (1, 1, bench.WARM_UP_PROMPTS), strict=True)
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
    report = await bench.bench(settings, load=models, say=said.append)
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
    report = await bench.bench(versus(monkeypatch, side), load=models)
    turn = ["open", "one", "many", "prompt", "close"]
    assert side.calls == ["close", *turn, *turn, "close"]
    assert len(models.loaded) == 3
    assert all(model.runner.closed for model in models.loaded)
    assert any("memory" in note for note in report.notes)


async def test_a_side_that_spins_while_idle_is_not_held_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = OtherSide(spins=True)
    report = await bench.bench(versus(monkeypatch, side), load=Models())
    assert side.calls.count("open") == 3
    assert any("idle" in note for note in report.notes)


async def test_what_fails_in_a_round_closes_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(OtherSide):
        async def measure(self, workload: Workload, prompts: bench.Prompts) -> float | None:
            raise BenchError("it fell over")

    side, models = Failing(), Models()
    with pytest.raises(BenchError, match="it fell over"):
        await bench.bench(versus(monkeypatch, side), load=models)
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
    assert bench.server_speed(ONE, [timings()], 2.0) == 32.0
    assert bench.server_speed(PROMPT, [timings(64, 1)], 2.0) == 500.0
    assert bench.server_speed(MANY, [timings(16, 8)] * 4, 2.0) == 16.0


def test_a_server_that_did_other_work_is_not_compared() -> None:
    with pytest.raises(BenchError, match="made 20 tokens; 33"):
        bench.server_speed(ONE, [timings(predicted=20)], 2.0)
    with pytest.raises(BenchError, match="computed 3 tokens of prompts"):
        bench.server_speed(ONE, [timings(prompt=3)], 2.0)


def test_figures_are_found_in_the_output_of_llama_bench() -> None:
    assert bench.parse_llama_bench(LLAMA_BENCH, 512, 0) == (500.0, "4321 (abc1234)")
    assert bench.parse_llama_bench(LLAMA_BENCH, 0, 128)[0] == 64.0
    with pytest.raises(BenchError, match="n_prompt=64, n_gen=0"):
        bench.parse_llama_bench(LLAMA_BENCH, 64, 0)
    for text in ("", "usage: llama-bench", '[{"n_prompt": 512}]', "[1]", '{"n_gen": 1}', "3"):
        with pytest.raises(BenchError, match="expected a list of tests"):
            bench.parse_llama_bench(text, 512, 0)


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(0o755)
    return path


async def test_llama_bench_runs_once_for_each_figure(tmp_path: Path) -> None:
    body = f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    executable = program(tmp_path / "llama-bench", f"{body}print('''{LLAMA_BENCH}''')")
    side = bench.LlamaBench(executable, Path("model.gguf"), 2)
    assert await side.measure(Workload("prompt", 1, 512, 1), []) == 500.0
    assert await side.measure(Workload("one", 1, 16, 128), []) == 64.0
    assert await side.measure(MANY, []) is None
    assert side.build == "llama-bench, build 4321 (abc1234)"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.partition(" -r ")[0] for call in calls] == ["-m model.gguf -t 2 -ngl 0"] * 2
    assert [call.partition(" -p ")[2] for call in calls] == ["512 -n 0", "0 -n 128"]


async def test_a_llama_bench_that_fails_is_quoted(tmp_path: Path) -> None:
    body = "print('loading', file=sys.stderr)\nsys.exit('error: failed to load model')"
    side = bench.LlamaBench(program(tmp_path / "llama-bench", body), Path("model.gguf"), 1)
    with pytest.raises(BenchError, match=r"ended with 1: error: failed to load model"):
        await side.measure(ONE, [])


def test_instruction_sets_that_llamacpp_leaves_unused_are_named() -> None:
    info = "CPU : SSE3 = 1 | AVX2 = 1 | F16C = 1 | OPENMP = 1 | "
    assert bench.unused_features(info, "sse avx2 avx512f") == ["AVX512"]
    assert bench.unused_features(info, "sse avx2 fma") == []
    assert bench.unused_features("", "sse avx2 avx512f") == []


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

    monkeypatch.setattr(bench, "find_spec", not_found)
    assert "pip install xllamacpp" in failure(capsys, none, "--vs-llamacpp")
    assert "expected is a llama-bench" in failure(capsys, none, "--vs-llamacpp", str(tmp_path))
    assert "expected is a llama-bench" in failure(capsys, none, "--vs-llamacpp", none)
    executable = program(tmp_path / "llama-bench", "")
    other = str(tmp_path / "other.gguf")
    told = failure(capsys, none, "--vs-llamacpp", str(executable), "--llamacpp-model", other)
    assert "other.gguf" in told
    assert "none.gguf" in failure(capsys, none, "--vs-llamacpp", str(executable))


def test_settings_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rounds=0" in failure(capsys, "m.gguf", "--rounds", "0")
    assert "tokens=1" in failure(capsys, "m.gguf", "--tokens", "1")
    assert "sequences=0" in failure(capsys, "m.gguf", "--sequences", "0")
    assert "prompt_tokens=-3" in failure(capsys, "m.gguf", "--prompt-tokens=-3")
    assert "threads=[1, 0]" in failure(capsys, "m.gguf", "--threads", "1,0")
    assert "no comparison" in failure(capsys, "m.gguf", "--llamacpp-model", "other.gguf")
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
