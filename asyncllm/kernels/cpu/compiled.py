"""Kernels as machine code: compiled by numba once, kept in a directory, found there ever after.

A kernel is a Python function of four integers, `(parameters, step, unit, thread)`, the first two
being addresses, that numba compiles to a C function. What is kept is keyed by the sources of all
kernels, the versions of numba and LLVM, and the processor with its features, so that an entry is
right or not found.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import threading
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import xxhash
from numba.core import types
from numba.core.caching import CompileResultCacheImpl
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from asyncllm import telemetry

_CHECKSUM_BYTES = 16
_ARGUMENTS = (types.int64,) * 4


def default_directory() -> Path:
    """The user's cache directory for this package."""
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local"))
    elif platform.system() == "Darwin":
        base = Path.home() / "Library/Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "asyncllm"


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _key() -> str:
    """Names everything that changes what the machine code is."""
    target = cpu_target.target_context.codegen().magic_tuple()
    versions = (numba.__version__, llvmlite.__version__, platform.python_version(), target)
    return hashlib.sha256(repr((_sources(), versions)).encode()).hexdigest()[:24]


class _Kept:
    """What numba asks for compiled functions: files in a directory, written whole or not at all."""

    def __init__(
        self, path: Path, function: Callable[..., Any], on_failure: Callable[[OSError], None]
    ) -> None:
        self._path = path
        self._on_failure = on_failure
        # It knows how numba's results become bytes; where they lie is decided here.
        self._form = CompileResultCacheImpl.__new__(CompileResultCacheImpl)
        self._function = function

    def load_overload(self, signature: Any, context: Any) -> Any:
        context.refresh()
        try:
            content = self._path.read_bytes()
        except OSError:
            return None
        checksum, data = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if xxhash.xxh3_128_digest(data) != checksum:
            return None  # torn or damaged: compiled and written anew
        try:
            return self._form.rebuild(context, pickle.loads(data))
        except Exception:  # whatever it holds, it is no kernel of this numba
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        data = dumps(self._form.reduce(result))
        part = self._path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(xxhash.xxh3_128_digest(data) + data)
            os.replace(part, self._path)
        except OSError as error:  # a full or read-only disk costs the next start some seconds
            telemetry.record("kernel-not-kept", path=str(self._path), error=str(error))
            self._on_failure(error)


class KernelLibrary:
    """Compiles kernels, or finds them compiled.

    Args:
        directory: where they are kept; `None`: the user's cache directory.
        on_compiled: told of each kernel that had to be compiled, and how many that makes.

    Attributes:
        compiled: names of those that had to be compiled.
        not_kept: why some of these will have to be compiled again; `None`: they will not.
    """

    def __init__(
        self,
        directory: Path | None = None,
        on_compiled: Callable[[str, int], None] = lambda name, count: None,
    ) -> None:
        self._on_compiled = on_compiled
        self._directory = (directory or default_directory()) / "cpu-kernels" / _key()
        self._functions: dict[str, Any] = {}  # they own the machine code
        self._lock = threading.Lock()
        self.compiled: list[str] = []
        self.not_kept: str | None = None

    def address(self, name: str, make: Callable[[], Callable[..., None]]) -> int:
        """Where a kernel's machine code is; valid as long as this object.

        Args:
            name: different for every kernel, instruction set and format.
            make: gives the Python function.
        """
        with self._lock:
            return self._address(name, make)

    def _address(self, name: str, make: Callable[[], Callable[..., None]]) -> int:
        found: Any = self._functions.get(name)
        if found is None:
            function = make()
            found = CFunc(
                function, (_ARGUMENTS, types.void), {}, {"error_model": "numpy", "nogil": True}
            )
            path = self._directory / f"{name}.kernel"
            found._cache = _Kept(path, function, self._cannot_keep)
            found.compile()
            if not found.cache_hits:
                self.compiled.append(name)
                self._on_compiled(name, len(self.compiled))
            self._functions[name] = found
        address: int = found.address
        return address

    def _cannot_keep(self, error: OSError) -> None:
        self.not_kept = f"compiled kernels cannot be kept, every start compiles them: {error}"
