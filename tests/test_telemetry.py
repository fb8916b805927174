"""Records reach whoever listens, and cost nobody else anything."""

from __future__ import annotations

import logging
import subprocess
import sys
import timeit
from collections.abc import Iterator

import pytest
import structlog

from asyncllm import telemetry


class Capture(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def capture() -> Iterator[Capture]:
    """A handler on the logger `asyncllm`, at DEBUG for the test."""
    logger = logging.getLogger("asyncllm")
    level = logger.level
    handler = Capture()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )


def test_a_record_carries_event_and_fields(capture: Capture) -> None:
    telemetry.record("sched-phase", step=3, admission_ns=120, reason="no room")
    (found,) = capture.records
    assert found.name == "asyncllm"
    assert found.levelno == logging.DEBUG
    assert found.getMessage() == "sched-phase step=3 admission_ns=120 reason=no room"
    assert vars(found)["event"] == "sched-phase"
    assert vars(found)["fields"] == {"step": 3, "admission_ns": 120, "reason": "no room"}


def test_an_event_without_fields_is_its_name(capture: Capture) -> None:
    telemetry.record("load-stage", level=logging.INFO)
    (found,) = capture.records
    assert found.getMessage() == "load-stage"
    assert found.levelno == logging.INFO
    assert vars(found)["fields"] == {}


def test_percent_signs_in_values_are_text(capture: Capture) -> None:
    telemetry.record("launch-failure", kernel="100%s %d", share="5%")
    (found,) = capture.records
    assert found.getMessage() == "launch-failure kernel=100%s %d share=5%"
    assert logging.Formatter("%(message)s").format(found) == found.getMessage()


def test_fields_may_have_the_names_logging_uses(capture: Capture) -> None:
    telemetry.record("load-stage", name="open", msg="m", args=(1,), module="x", exc_info=None)
    (found,) = capture.records
    assert found.name == "asyncllm"
    assert vars(found)["fields"]["name"] == "open"


def test_records_below_the_level_go_nowhere(capture: Capture) -> None:
    logging.getLogger("asyncllm").setLevel(logging.WARNING)
    telemetry.record("sched-phase")
    telemetry.record("launch-failure", level=logging.WARNING)
    assert [vars(found)["event"] for found in capture.records] == ["launch-failure"]
    assert telemetry.enabled(logging.WARNING)
    assert not telemetry.enabled()


def test_an_unconfigured_application_sees_and_loads_nothing() -> None:
    done = run(
        "import logging, sys\n"
        "from asyncllm import telemetry\n"
        "telemetry.record('sched-phase', step=1)\n"
        "assert 'structlog' not in sys.modules\n"
        "telemetry.record('launch-failure', level=logging.WARNING, kernel='x')\n"
        "telemetry.record('launch-failure', level=logging.ERROR, kernel='x')\n"
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_the_applications_own_logging_shows_the_records() -> None:
    done = run(
        "import logging\n"
        "from asyncllm import telemetry\n"
        "logging.basicConfig(level=logging.DEBUG, format='%(levelname)s %(name)s %(message)s')\n"
        "telemetry.record('sched-phase', step=1)\n"
    )
    assert done.stderr == "DEBUG asyncllm sched-phase step=1\n"
    assert done.stdout == ""


def test_structlogs_global_configuration_is_left_alone(capture: Capture) -> None:
    before = dict(structlog.get_config())
    configured = structlog.is_configured()
    telemetry.record("sched-phase", step=1)
    assert structlog.get_config() == before
    assert structlog.is_configured() == configured
    assert len(capture.records) == 1


def test_the_applications_structlog_configuration_does_not_change_records() -> None:
    done = run(
        "import logging, structlog\n"
        "def refuse(*_): raise structlog.DropEvent\n"
        "structlog.configure(processors=[refuse])\n"
        "from asyncllm import telemetry\n"
        "logging.basicConfig(level=logging.DEBUG, format='%(message)s')\n"
        "telemetry.record('sched-phase', step=1)\n"
        "assert structlog.get_config()['processors'] == [refuse]\n"
    )
    assert done.stderr == "sched-phase step=1\n"


def test_a_record_nobody_wants_costs_next_to_nothing() -> None:
    assert not telemetry.enabled()
    seconds = min(timeit.repeat(lambda: telemetry.record("sched-phase", a=1), number=1000))
    assert seconds / 1000 < 20e-6  # some 0.5 us here; the bound allows for a busy machine
