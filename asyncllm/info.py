"""What an engine says of itself: load progress, the model, and counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncllm.scheduler.step import DecodeMode


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One report while a model loads.

    Attributes:
        stage: what is being done: a name of `ModelInfo.load_stages`, or `"compiling ..."` with a
            kernel's name, within such a stage.
        fraction: how much of the whole load is done, 0 to 1.
        bytes_done: bytes of weights bound so far.
        bytes_total: bytes of weights in the checkpoint; 0 until it is open.
    """

    stage: str
    fraction: float
    bytes_done: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class LoadStage:
    """A stage of loading.

    Attributes:
        name: what was done.
        seconds: how long it took.
    """

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded, and how.

    Attributes:
        name: the checkpoint's own name, or its file's.
        architecture: the family's name, as the checkpoint gives it.
        parameters: number of weights.
        formats: for each tensor format the number of tensors kept in it.
        weights_bytes: bytes of weights held.
        context_length: tokens one sequence may hold in this engine.
        model_context_length: tokens the model was made for.
        kv_ceiling_tokens: tokens that all running sequences may hold together.
        kv_ceiling_bytes: bytes the K/V pool may grow to.
        device: where it runs, such as `"cpu"`.
        dtype: type of activations.
        kv_dtype: type of K/V.
        backend: which program runs the steps.
        backend_notes: why no faster one does, and how to get it.
        deterministic: whether a greedy or seeded request gives the same tokens whatever else
            runs; see the page on concurrency for what holds where it is `False`.
        load_stages: stages of loading with their seconds.
    """

    name: str
    architecture: str
    parameters: int
    formats: Mapping[str, int]
    weights_bytes: int
    context_length: int
    model_context_length: int
    kv_ceiling_tokens: int
    kv_ceiling_bytes: int
    device: str
    dtype: str
    kv_dtype: str
    backend: str
    backend_notes: tuple[str, ...]
    deterministic: bool
    load_stages: tuple[LoadStage, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent snapshot of an engine's counters, published once a step.

    Attributes:
        received: requests that reached the engine thread since loading.
        waiting: requests that wait for admission, the preempted ones among them.
        running: sequences admitted and not ended; `prefilling` and `decoding` of them.
        prefilling: running sequences whose prompt (or recomputed prefix) is being computed, or
            read from the block store.
        decoding: running sequences that produce tokens.
        admitted: sequences admitted, first time.
        preempted: times a sequence was preempted.
        resumed: times a preempted sequence was admitted again.
        finished: requests that ended by stop or length.
        cancelled: requests cancelled or timed out.
        failed: requests that ended by an error of their own.
        steps: steps executed.
        host_s: seconds the engine thread worked while there was something to run, without those in
            which it waited for a device (on a CPU: in which it ran a step). It includes waiting for
            the interpreter's lock, and is a turn of the thread behind `steps`.
        kv_blocks_total: blocks the pool holds now, all layer groups summed.
        kv_blocks_used: blocks held by live sequences.
        kv_blocks_cached: blocks kept for reuse, free on demand.
        kv_blocks_free: the rest.
        kv_pool_bytes: bytes of the pool now; on a GPU those of memory that is mapped.
        kv_pool_growths: times it grew.
        prefix_hit_tokens: prompt tokens whose K/V was reused.
        store_hit_blocks: blocks read from the block store.
        store_written_blocks: blocks written to it.
        store_rejected_blocks: reads that failed verification.
        store_dropped_blocks: blocks not written: no slot was free, or the disk failed.
        store_faults: I/O faults of the store.
        decode_mode: form of the newest step.
        decode_mode_reason: why not the faster form.
        launch_failures: kernels that failed and were replaced.
        weights_bytes: bytes of weights held.
        expert_bytes_resident: bytes of expert banks on the device.
        expert_bytes_streamed: bytes of experts copied to the device.
        expert_hit_rate: share of selected experts that were resident, 0 to 1.
    """

    received: int = 0
    waiting: int = 0
    running: int = 0
    prefilling: int = 0
    decoding: int = 0
    admitted: int = 0
    preempted: int = 0
    resumed: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    host_s: float = 0.0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_free: int = 0
    kv_pool_bytes: int = 0
    kv_pool_growths: int = 0
    prefix_hit_tokens: int = 0
    store_hit_blocks: int = 0
    store_written_blocks: int = 0
    store_rejected_blocks: int = 0
    store_dropped_blocks: int = 0
    store_faults: int = 0
    decode_mode: DecodeMode = "idle"
    decode_mode_reason: str = ""
    launch_failures: int = 0
    weights_bytes: int = 0
    expert_bytes_resident: int = 0
    expert_bytes_streamed: int = 0
    expert_hit_rate: float = 0.0
