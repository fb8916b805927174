"""Calls the compiled kernels of the CPU backend directly, without a model or a team."""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from asyncllm.kernels.cpu import step as s
from asyncllm.kernels.cpu.compiled import KernelLibrary
from asyncllm.kernels.cpu.isa import _NEEDS, Isa, detect_isa
from asyncllm.kernels.cpu.tiles import TILE_ROWS, tile_bytes

Array = np.ndarray[Any, Any]

_FUNCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)

# All formats in all forms take minutes to compile: on demand.
EVERYTHING = os.environ.get("ASYNCLLM_TEST_EVERY_KERNEL") == "1"


@cache
def directory() -> Path:
    """Where all tests of a session keep compiled kernels, so that each is compiled once.

    `ASYNCLLM_TEST_KERNELS` names one that outlives the session.
    """
    kept = os.environ.get("ASYNCLLM_TEST_KERNELS")
    if kept:
        return Path(kept)
    temporary = tempfile.TemporaryDirectory(prefix="asyncllm-kernels-")
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


@cache
def library() -> KernelLibrary:
    return KernelLibrary(directory())


def _runs(isa: Isa) -> bool:
    from numba.core.registry import cpu_target

    features = str(cpu_target.target_context.codegen().magic_tuple()[2]).split(",")
    return all(f"+{name}" in features for name in _NEEDS.get(isa, ()))


BEST = detect_isa()
ISAS = [isa for isa in Isa if _runs(isa)]
"""The forms that this machine can run."""


def kernel(name: str, make: Callable[[], Callable[..., None]]) -> Callable[..., None]:
    """A compiled kernel as a function of four integers."""
    return _FUNCTION(library().address(name, make))


def record(fields: Any, **values: Any) -> Array:
    """A kernel's parameters; an array stands for its address."""
    words = np.zeros(len(fields._fields), np.int64)
    for name, value in values.items():
        place = fields._fields.index(name)
        if isinstance(value, np.ndarray):
            words[place] = value.ctypes.data
        elif isinstance(value, float):
            words.view(np.int32)[2 * place] = struct.unpack("<i", struct.pack("<f", value))[0]
        else:
            words[place] = value
    return words


def run(
    function: Callable[..., None],
    parameters: Array,
    *,
    rows: int,
    each: int,
    units: int,
    chosen: int = 0,
    row_block: int = 64,
) -> None:
    """All units of a phase, cut by one rule; in an order that nothing may depend on."""
    step = np.zeros(s.RULES + 2, np.int64)
    step[s.ROWS], step[s.CHOSEN], step[s.ROW_BLOCK] = rows, chosen, row_block
    step[s.RULES], step[s.RULES + 1] = units, each
    for unit in reversed(range(units)):
        function(parameters.ctypes.data, step.ctypes.data, unit, 0)


def run_rows(function: Callable[..., None], parameters: Array, rows: int, each: int = 2) -> None:
    """A kernel whose units are some rows."""
    run(function, parameters, rows=rows, chosen=rows, each=each, units=-(-rows // each))


def zero_tiles(rows: int, columns: int, form: str) -> Array:
    """Zeros for the tiles of a weight, at a multiple of 64 bytes."""
    count, size = -(-rows // TILE_ROWS), tile_bytes(form, columns)
    memory = np.zeros(count * size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * size].reshape(count, size)
