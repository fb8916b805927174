"""The command line, as a person calls it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def asyncllm(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncllm", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        timeout=100,
        check=False,
    )


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    page = tmp_path / "model.gguf"
    page.write_text("<!DOCTYPE html><html>not found</html>")
    for arguments, words in (
        (["run", str(tmp_path / "none.gguf"), "hi"], "none.gguf"),
        (["info", str(page)], "HTML"),
        (["run", str(page), "hi", "--temperature", "-1"], "temperature"),
        (["info", str(page), "--max-seqs", "0"], "max_seqs"),
        (["run", str(page)], "prompt is empty"),
        (["run", str(page), ""], "prompt is empty"),
    ):
        done = asyncllm(*arguments)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert asyncllm("walk").returncode == 2
    assert asyncllm("--version").stdout.startswith("asyncllm ")


@pytest.mark.real_model
def test_run_streams_an_answer(smollm2_path: Path) -> None:
    model = str(smollm2_path)
    question = "What is the capital of Germany?"
    chat = asyncllm("run", model, question, "--max-tokens", "16", "--stats")
    assert chat.returncode == 0, chat.stderr
    assert "Berlin" in chat.stdout
    assert "tokens/s; ended by stop" in chat.stderr
    said = "The capital of France is"
    raw = asyncllm("run", "--max-tokens", "4", model, "--raw", "-", stdin=said)
    assert raw.stdout.strip().startswith("Paris")


@pytest.mark.real_model
def test_info_says_what_a_model_is(smollm2_path: Path) -> None:
    told = json.loads(asyncllm("info", str(smollm2_path), "--json").stdout)
    assert told["architecture"] == "llama"
    assert told["formats"]["Q4_1"] > 100
    text = asyncllm("info", str(smollm2_path)).stdout
    assert "chat template      yes" in text


@pytest.mark.real_model
def test_an_interrupt_ends_a_run_at_once(smollm2_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "asyncllm", "run", str(smollm2_path), "--raw", "Once upon a time"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        started = time.perf_counter()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert time.perf_counter() - started < 3.0
        assert "Traceback" not in process.stderr.read()
