"""Which program runs a model's steps, and why not a faster one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from asyncllm import telemetry
from asyncllm.errors import OptionsError
from asyncllm.model.causal_lm import CausalLM
from asyncllm.runner.plain import PlainRunner
from asyncllm.runner.threads import physical_cores, use_threads

if TYPE_CHECKING:
    from asyncllm.kernels.cpu.compiled import KernelLibrary
    from asyncllm.kernels.cpu.isa import Isa
    from asyncllm.kv.pool import KvPool
    from asyncllm.model.config import ModelConfig
    from asyncllm.options import EngineOptions
    from asyncllm.scheduler.step import Runner


READERS = 6  # more were not measured


@dataclass(slots=True)
class Backend:
    """The choice, made before weights are read.

    Attributes:
        threads: that work on a step.
        wanted_threads: as the options have it.
        name: what `ModelInfo.backend` says.
        kv_dtype: type K and V are kept in unless another is asked for.
        deterministic: whether a row's arithmetic is the same whatever rows run beside it.
        device: what torch calls it.
        notes: why no faster backend serves, and how to get it.
        library: of compiled kernels; `None` on the plain path.
        isa: which form of them.
        tiles: the weights as they compute with them, between packing and the runner.
    """

    threads: int
    wanted_threads: int | None = None
    name: str = "plain torch"
    kv_dtype: str = "float32"
    deterministic: bool = False
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)
    library: KernelLibrary | None = None
    isa: Isa | None = None
    tiles: dict[str, Any] = field(default_factory=dict)

    @property
    def packs(self) -> bool:
        """Whether weights are brought into another form."""
        return self.library is not None

    @property
    def readers(self) -> int:
        """Threads that read a block store: a GPU leaves cores to them."""
        return 1 if self.device == "cpu" else max(1, min(READERS, (os.cpu_count() or 2) // 2))

    @property
    def kv_layout(self) -> str:
        """What lies where in a block of the pool, and how it was computed: part of its identity.

        The number changes with the program.
        """
        return "plain 1" if self.library is None else "compiled 1"

    def note(self, reason: str) -> None:
        """Say why no faster backend serves."""
        self.notes.append(reason)
        telemetry.record("load-stage", stage="backend", backend=self.name, reason=reason)

    def available_bytes(self, weights_bytes: int) -> int | None:
        """Bytes that the K/V pool may grow into; `None`: the process's own memory decides."""
        return None

    def suit(self, config: ModelConfig, block_tokens: int, weights_bytes: int = 0) -> Backend:
        """Itself, or what serves instead where a model's shape or size asks for it."""
        if self.library is None:
            return self
        from asyncllm.runner.cpu_step import refusal

        reason = refusal(config, block_tokens)
        if reason is not None:
            self._fall_back(reason)
        return self

    def pack(self, model: CausalLM, on_tiles: Callable[[int], None]) -> None:
        """Bring the weights into the form that the backend computes with."""
        if self.library is None:
            return
        from asyncllm.runner.cpu_weights import pack_model

        try:
            self.tiles = pack_model(model, self.library, self.threads, on_tiles)
        except (ArithmeticError, LookupError, ValueError, OSError) as error:
            self._fall_back(f"weights cannot be repacked: {error}")

    def runner(
        self,
        model: CausalLM,
        pool: KvPool,
        *,
        vocab_size: int,
        max_rows: int,
        max_sequences: int,
        should_stop: Callable[[], bool],
    ) -> Runner:
        """The runner; the plain one where kernels cannot be compiled."""
        if self.library is not None and self.isa is not None:
            from asyncllm.runner.cpu_runner import CpuRunner
            from asyncllm.runner.cpu_step import CpuProgram

            try:
                program = CpuProgram(
                    model,
                    self.tiles,
                    pool,
                    library=self.library,
                    isa=self.isa,
                    vocab_size=vocab_size,
                    max_rows=max_rows,
                    max_sequences=max_sequences,
                    threads=self.threads,
                    helps=self.threads >= physical_cores(),
                    should_stop=should_stop,
                )
            except Exception as error:  # whatever a compiler may raise
                self._fall_back(f"kernels cannot be compiled: {error!r}")
            else:
                self.tiles = {}
                if program.threads < self.threads:
                    self.note(f"the system gave only {program.threads} of {self.threads} threads")
                if self.library.not_kept is not None:
                    self.note(self.library.not_kept)
                return CpuRunner(program, pool, vocab_size=vocab_size)
        return PlainRunner(
            model,
            pool,
            vocab_size=vocab_size,
            max_rows=max_rows,
            threads=self.threads,
            should_stop=should_stop,
        )

    def _fall_back(self, reason: str) -> None:
        self.name, self.kv_dtype, self.deterministic = "plain torch", "float32", False
        self.library = self.isa = None
        self.tiles = {}
        self.threads = use_threads(self.wanted_threads)
        self.note(reason)


# Of the free memory: so much of it and no more goes to 16-bit copies for passes of many rows.
DENSE_SHARE = 0.15


def _resident_bytes(weights_bytes: int) -> int:
    """Bytes of device memory that a model takes without its K and V.

    Repacked, weights take a little more; activations and graphs take the rest of the reserve.
    """
    return int(1.05 * weights_bytes) + (1 << 30)


@dataclass(slots=True)
class CudaBackend(Backend):
    """Triton kernels on an NVIDIA GPU."""

    model: Any = None
    prefill_weights: str = "auto"
    instead: Callable[[], Backend] | None = None

    @property
    def packs(self) -> bool:
        """Weights are brought to the device."""
        return True

    @property
    def kv_layout(self) -> str:
        """As for the others: part of a block's identity."""
        return "cuda 1"

    def available_bytes(self, weights_bytes: int) -> int | None:
        """Bytes of device memory that will be free once the weights are there.

        The pool takes them as it grows, if nobody else has by then.
        """
        import torch

        free = int(torch.cuda.mem_get_info(self.device)[0])
        return int((1 - DENSE_SHARE) * free) - _resident_bytes(weights_bytes)

    def suit(self, config: ModelConfig, block_tokens: int, weights_bytes: int = 0) -> Backend:
        """Itself; for a model the device cannot serve the CPU, unless a GPU was asked for.

        Raises:
            OptionsError: it was.
        """
        import torch

        from asyncllm.runner.cuda_step import refusal

        reason = refusal(config, block_tokens)
        free = torch.cuda.mem_get_info(self.device)[0]
        if reason is None and _resident_bytes(weights_bytes) > free:
            reason = f"its weights take {weights_bytes} bytes, and {free} are free on the device"
        if reason is None:
            return self
        if self.instead is None:
            raise OptionsError(f'device={self.device!r}: {reason}; device="cpu" runs it')
        backend = self.instead()
        backend.note(f"not on the GPU: {reason}")
        return backend.suit(config, block_tokens, weights_bytes)

    def pack(self, model: CausalLM, on_tiles: Callable[[int], None]) -> None:
        """Bring the weights to the device."""
        import torch

        from asyncllm.runner.device_model import DeviceModel

        self.model = DeviceModel(model, torch.device(self.device), on_tiles)
        free = torch.cuda.mem_get_info(self.device)[0]
        keeps = self.prefill_weights == "auto" and not self.deterministic
        if keeps and self.model.dense_bytes < DENSE_SHARE * free:
            self.model.keep_dense()

    def runner(
        self,
        model: CausalLM,
        pool: KvPool,
        *,
        vocab_size: int,
        max_rows: int,
        max_sequences: int,
        should_stop: Callable[[], bool],
    ) -> Runner:
        """The runner on the device."""
        import torch

        from asyncllm.runner.cuda_step import CudaProgram
        from asyncllm.runner.pipeline import CudaRunner
        from asyncllm.runner.steady import SteadyProgram

        weights, self.model = self.model, None
        slots = 2 * max_sequences
        program = (SteadyProgram if self.deterministic else CudaProgram)(
            model,
            weights,
            pool,
            device=torch.device(self.device),
            vocab_size=vocab_size,
            max_rows=max_rows,
            max_batch=max_sequences,
            slots=slots,
            pdl=torch.cuda.get_device_capability(self.device) >= (9, 0),
        )
        return CudaRunner(program, pool, vocab_size=vocab_size, slots=slots)


def _cuda_backend(options: EngineOptions, instead: Callable[[], Backend]) -> CudaBackend | None:
    """The GPU's backend, where it is wanted and there; `instead` is for what only then shows."""
    if options.device == "cpu":
        return None
    import torch

    reason = None
    if options.prefill_weights == "int8":
        reason = 'prefill_weights="int8" is not there yet; use "auto" or "packed"'
    elif options.widen_weights:
        reason = "widen_weights=True asks for the plain path, on a CPU"
    elif not torch.cuda.is_available():
        reason = "torch finds no CUDA device"
    elif find_spec("triton") is None:
        reason = "triton is not installed"
    elif not (os.environ.get("CC") or any(map(which, ("cc", "gcc", "clang")))):
        reason = "there is no C compiler (gcc or clang), with which triton makes its launchers"
    if reason is not None:
        if options.device == "auto":
            return None
        raise OptionsError(f"device={options.device!r}: {reason}")
    device = "cuda:0" if options.device in ("auto", "cuda") else options.device
    if int(device.partition(":")[2]) >= torch.cuda.device_count():
        raise OptionsError(f"device={device!r}: there are {torch.cuda.device_count()}")
    use_threads(1)
    torch.cuda.set_device(device)  # of this thread
    return CudaBackend(
        1,
        name="triton",
        kv_dtype="float16",
        deterministic=options.deterministic,
        device=device,
        notes=[_device_name(device)],
        prefill_weights=options.prefill_weights,
        instead=instead if options.device == "auto" else None,
    )


def _device_name(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))


def choose_backend(
    options: EngineOptions, on_compiled: Callable[[str, int], None] = lambda name, count: None
) -> Backend:
    """The fastest backend that this machine has; `Backend.suit` says whether a model can have it.

    Args:
        options: of the engine.
        on_compiled: told of each kernel that had to be compiled, and how many that makes.
    """
    return _cuda_backend(options, lambda: _cpu_backend(options, on_compiled)) or _cpu_backend(
        options, on_compiled
    )


def _cpu_backend(options: EngineOptions, on_compiled: Callable[[str, int], None]) -> Backend:
    reason = None
    if options.widen_weights:
        reason = "widen_weights=True asks for the plain path"
    elif find_spec("numba") is None:
        reason = 'numba is not installed: pip install "asyncllm[cpu]" brings the fast CPU kernels'
    if reason is not None:
        backend = Backend(use_threads(options.threads), options.threads)
        backend.note(reason)
        return backend
    from asyncllm.kernels.cpu.compiled import KernelLibrary
    from asyncllm.kernels.cpu.isa import detect_isa
    from asyncllm.kernels.cpu.team import can_team

    use_threads(1)  # torch only chooses tokens now
    isa = detect_isa()
    directory = None if options.tune_dir is None else Path(options.tune_dir).expanduser()
    backend = Backend(
        options.threads or physical_cores(),
        options.threads,
        name=f"numba {isa.name.lower().replace('_', '-')}",
        kv_dtype="float16",
        deterministic=True,
        library=KernelLibrary(directory, on_compiled),
        isa=isa,
    )
    if backend.threads > 1 and not can_team():
        backend.threads = 1
        backend.note("threads cannot wait for each other on this system: one does all the work")
    return backend
