"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx

from scripts import models

# Triton looks at it when it is first imported, by whichever test that is.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidia0").exists() else "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background; the processes that tests start would ignore interrupts too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF (Q4_1, Q8_0)."""
    return models.smollm2()


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M as GGUF (Q4_K_M)."""
    return models.gemma()


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """A blocking call of ours on a running event loop fails the test."""
    with blockbuster_ctx("asyncllm"):
        yield
