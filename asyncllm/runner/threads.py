"""How many CPU threads torch uses on the engine thread, and on no other.

`torch.set_num_threads` is for the whole process. The OpenMP setting beneath it belongs to the
calling thread, and torch's products ask OpenMP, so that is what is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path

import torch

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Cores this process may use: its affinity, and the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no control groups, or not of version 2
    return cores


def physical_cores() -> int:
    """Cores this process may use, those that share one counted once."""
    if not hasattr(os, "sched_getaffinity"):
        return available_cores()
    cores = set()
    for number in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(number))
    return min(len(cores), available_cores())


def use_threads(wanted: int | None) -> int:
    """Set the calling thread's number; returns what torch then uses there.

    Args:
        wanted: threads, or `None` for torch's own number, less where fewer cores are available.
    """
    # torch sets each thread up at its first parallel operation, which would undo an earlier change.
    torch.zeros(1).add_(1)
    set_threads(min(torch.get_num_threads(), available_cores()) if wanted is None else wanted)
    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Change the number again; cheap. Where OpenMP is another or none, torch's own number stays."""
    if count != torch.get_num_threads():
        with contextlib.suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).omp_set_num_threads(ctypes.c_int(count))
