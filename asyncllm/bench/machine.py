"""The machine that is measured on: what it is, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from asyncllm.options import EngineOptions

# Far more than caches hold.
CPU_READ_BYTES: Final = 1 << 30
GPU_READ_BYTES: Final = 4 << 30
READS: Final = 5


def on_gpu(options: EngineOptions) -> bool:
    """Whether an engine with these options is to be on a GPU, as far as the machine goes."""
    if options.device != "auto":
        return options.device != "cpu"
    if find_spec("triton") is None:
        return False
    import torch

    return torch.cuda.is_available()


def own_threads() -> int:
    """Threads an engine takes where nothing is said."""
    from asyncllm.runner.threads import physical_cores

    return physical_cores()


def read_ceilings(device: str, threads: Sequence[int]) -> dict[str, float]:
    """Bytes per second that a sum over much memory reads, the best of some, by what reads it.

    Args:
        device: `"cpu"` or a GPU, as torch calls it.
        threads: on a CPU, numbers of threads.
    """
    if device == "cpu":
        counts = sorted({1, *threads})
        return {f"{n} thread{'s' * (n > 1)}": _cpu_reads(n) for n in counts}
    return {device: _gpu_reads(device)}


def _cpu_reads(threads: int) -> float:
    import torch

    from asyncllm.kv.pool import available_bytes

    size = min(CPU_READ_BYTES, available_bytes() // 4)
    values = torch.ones(size // 4)
    parts = values.chunk(threads)
    best = float("inf")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads are ours
    try:
        for _ in range(READS):
            readers = [threading.Thread(target=torch.sum, args=(part,)) for part in parts]
            started = time.perf_counter()
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            best = min(best, time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return values.nbytes / best


def _gpu_reads(device: str) -> float:
    import torch

    size = min(GPU_READ_BYTES, int(torch.cuda.mem_get_info(device)[0]) // 4)
    event: Any = torch.cuda.Event
    best = float("inf")
    with torch.cuda.device(device):
        values = torch.ones(size // 4, device=device)
        out = torch.zeros((), device=device)
        for _ in range(READS + 1):  # the first of them warms up
            first, last = (event(enable_timing=True) for _ in range(2))
            first.record()
            torch.sum(values, dim=0, out=out)
            last.record()
            last.synchronize()
            best = min(best, first.elapsed_time(last) / 1e3)
        nbytes = values.nbytes
        del values, out
        torch.cuda.empty_cache()
    return nbytes / best


def described(device: str) -> dict[str, str]:
    """Label to value: processor, GPU, versions.

    Args:
        device: as torch calls it.
    """
    cpu = cpu_value("model name") or platform.processor() or platform.machine()
    out = {"CPU": f"{cpu}, {_cores()}"}
    compiler = "numba"
    if device != "cpu":
        import torch

        compiler = "triton"
        out["GPU"] = f"{torch.cuda.get_device_name(device)}, {device}"
    return out | {
        "versions": ", ".join(
            f"{package} {version(package)}" for package in ("asyncllm", "torch", compiler)
        )
        + f", Python {platform.python_version()}"
    }


def version(package: str) -> str:
    """Of an installed package."""
    from asyncllm.version import __version__

    if package == "asyncllm":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_value(wanted: str) -> str:
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
