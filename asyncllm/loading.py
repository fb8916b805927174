"""`build`: the load sequence, stage by stage, timed and reported; runs on the engine thread."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from asyncllm import telemetry
from asyncllm.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncllm.engine_thread import Face, Loading, Parts
from asyncllm.errors import CorruptCheckpointError, ModelLoadError, OptionsError, RequestError
from asyncllm.info import LoadProgress, LoadStage, ModelInfo
from asyncllm.options import CHUNK_MAX, CHUNK_MAX_GPU, EngineOptions, SamplingParams, StrPath
from asyncllm.scheduler.step import LayerGroup, Row, Runner, SamplingSpec, StepPlan

if TYPE_CHECKING:
    import torch

    from asyncllm.kv.pool import KvPool
    from asyncllm.kv.store import BlockStore
    from asyncllm.model.config import ModelConfig
    from asyncllm.runner.backend import Backend
    from asyncllm.scheduler.chunking import ChunkPolicy

STAGES = (
    *("options", "backend", "checkpoint", "configuration", "tokenizer", "weights", "kv-pool"),
    *("kernels", "warm-up"),
)
WARM_UP_ROWS = 128  # everything is compiled by then; it brings memory and caches up

CHUNKS_TIMED = 3  # the first may compile and capture; the last counts

# About as many kernels a model needs; only for the fraction that progress shows.
KERNELS = 16

# The checkpoint's generation defaults: its key to the sampling parameter.
DEFAULTS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(slots=True)
class _Stages:
    """Times the stages and reports them."""

    loading: Loading
    bytes_total: int = 0
    bytes_done: int = 0
    fraction: float = 0.0
    done: list[LoadStage] = field(default_factory=list)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.check()
        self.report(name)
        started = perf_counter()
        yield
        seconds = perf_counter() - started
        self.done.append(LoadStage(name, seconds))
        telemetry.record("load-stage", stage=name, seconds=round(seconds, 6))

    def report(self, name: str, part: float = 0.0) -> None:
        # Kernels are compiled in the middle of other stages: what was told is not taken back.
        self.fraction = max(self.fraction, min(1.0, (len(self.done) + part) / len(STAGES)))
        fraction = self.fraction
        self.loading.progress(LoadProgress(name, fraction, self.bytes_done, self.bytes_total))

    def check(self) -> None:
        if self.loading.should_stop():
            raise ModelLoadError("loading was given up")

    def bound(self, nbytes: int) -> None:
        """So many bytes more are where they stay; give up here if that is wanted."""
        self.check()
        self.bytes_done += nbytes
        self.report("weights", self.bytes_done / max(1, self.bytes_total))

    def compiled(self, name: str, count: int) -> None:
        """A kernel had to be compiled, the first time on this machine."""
        telemetry.record("kernel-compiled", kernel=name)
        self.report(f"compiling {name}", min(1.0, count / KERNELS))


def build(model: StrPath, options: EngineOptions, loading: Loading) -> Parts:
    """Load a model.

    Args:
        model: path of the checkpoint.
        options: validated on their own already; here against the model and the machine.
        loading: hears of progress, and says whether to give up.

    Raises:
        OptionsError: an option does not suit the model or the machine.
        ModelLoadError: the checkpoint cannot be loaded; the message says why.
    """
    stages = _Stages(loading)
    with stages.stage("options"):
        _refuse_what_is_not_there(options)
    with stages.stage("backend"):
        import torch

        from asyncllm.runner.backend import choose_backend

        backend = choose_backend(options, stages.compiled)
    with torch.inference_mode():
        return _build(model, options, loading, stages, backend)


def _build(
    model: StrPath, options: EngineOptions, loading: Loading, stages: _Stages, backend: Backend
) -> Parts:
    from asyncllm.kv.blocks import KvCache
    from asyncllm.kv.pool import KvPool
    from asyncllm.model.causal_lm import CausalLM
    from asyncllm.model.config import ModelConfig
    from asyncllm.model.identity import fingerprint
    from asyncllm.scheduler.chunking import ChunkPolicy
    from asyncllm.scheduler.scheduler import Scheduler
    from asyncllm.scheduler.transfers import Transfers
    from asyncllm.text.stream import TextStream
    from asyncllm.text.tokenizer import Tokenizer

    with contextlib.ExitStack() as opened, contextlib.ExitStack() as unfinished:
        with stages.stage("checkpoint"):
            # The map outlives the checkpoint: bound weights look into it.
            checkpoint = opened.enter_context(open_checkpoint(model))
            stages.bytes_total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        with stages.stage("configuration"):
            config = ModelConfig.from_checkpoint(checkpoint)
            longest = options.context_length or config.context_length
            size = options.chunk if options.chunk == "auto" else min(options.chunk, longest)
            backend = backend.suit(config, options.block_tokens, stages.bytes_total)
            chunk = ChunkPolicy(size, options.chunk_budget_ms, **_sizes(config, backend))
            kv_dtype = _kv_dtype(options, backend)
            available = backend.available_bytes(stages.bytes_total)
            groups, context_length = _layer_groups(
                config, options, chunk.maximum, kv_dtype, available
            )
        with stages.stage("tokenizer"):
            tokenizer = Tokenizer.from_metadata(checkpoint.metadata, str(checkpoint.path))
            _check_vocabulary(checkpoint, config, tokenizer.vocab_size)
        with stages.stage("weights"):
            causal_lm = CausalLM.bind(
                checkpoint,
                config,
                context_length=context_length,
                widen_weights=options.widen_weights,
                on_tensor=lambda tensor: stages.bound(0 if backend.packs else tensor.nbytes),
            )
            backend.pack(causal_lm, stages.bound)
        with stages.stage("kv-pool"):
            pool = KvPool(
                groups,
                block_tokens=options.block_tokens,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                dtype=kv_dtype,
                device=backend.device,
            )
            unfinished.callback(pool.close)
        with stages.stage("kernels"):
            runner = backend.runner(
                causal_lm,
                pool,
                vocab_size=tokenizer.vocab_size,
                max_rows=chunk.maximum + options.max_seqs,
                max_sequences=options.max_seqs,
                should_stop=loading.should_stop,
            )
            unfinished.callback(runner.close)
            del causal_lm  # where the weights were packed anew, the checkpoint's are let go
        transfers: Transfers | None = None
        identity = _name(checkpoint).encode()  # enough for blocks that never leave this engine
        if options.kv_store is not None:
            with stages.stage("kv-store"):
                settings = {
                    "block_tokens": options.block_tokens,
                    "widen_weights": options.widen_weights,
                    "kv_dtype": str(kv_dtype),
                    "kv_layout": backend.kv_layout,
                    "deterministic": backend.deterministic,
                    "block_bytes": [group.block_bytes for group in groups],
                }
                identity = fingerprint(
                    checkpoint, config, context_length=context_length, **settings
                )
                store = _open_store(options, pool, identity, _name(checkpoint), backend.readers)
                unfinished.callback(store.close)
                transfers = Transfers(store, groups, lambda: chunk.prompt_rate)
        with stages.stage("warm-up"):
            _throwaway_steps(runner, pool, min(WARM_UP_ROWS, chunk.maximum, context_length - 1))
            if transfers is not None and backend.device != "cpu":
                _time_a_chunk(runner, pool, chunk, context_length - 1)
        info = _info(checkpoint, config, options, backend, kv_dtype, groups, context_length, stages)
        defaults = _generation_defaults(checkpoint)
        unfinished.pop_all()
    cache = KvCache(
        groups,
        block_tokens=options.block_tokens,
        max_chunk=chunk.maximum,
        grow=runner.grow,
        fingerprint=identity,
        prefix_cache=options.prefix_cache,
        below=transfers,
    )
    scheduler = Scheduler(
        cache,
        max_seqs=options.max_seqs,
        context_length=context_length,
        chunk=chunk,
        decode_refusal=runner.decode_refusal,
        transfers=transfers,
    )

    def close() -> None:
        if transfers is not None:
            transfers.store.close()
        runner.close()

    stages.report("ready")
    return Parts(
        face=Face(info, tokenizer, defaults),
        scheduler=scheduler,
        runner=runner,
        new_text=lambda params: TextStream(tokenizer, params),
        token_text=lambda token: tokenizer.token_bytes(token).decode("utf-8", "replace"),
        pool_bytes=lambda: pool.pool_bytes,
        close=close,
    )


def _refuse_what_is_not_there(options: EngineOptions) -> None:
    """Options that would be without effect are errors."""
    if options.kv_store is not None and not options.prefix_cache:
        raise OptionsError("kv_store: what is stored is prefixes; it needs prefix_cache=True")
    if options.dtype not in ("auto", "float32"):
        raise OptionsError(f'dtype={options.dtype!r}: accepted are "auto" and "float32" so far')


def _name(checkpoint: Checkpoint) -> str:
    return checkpoint.get("general.name", str, Path(checkpoint.path).stem)


def _open_store(
    options: EngineOptions, pool: KvPool, identity: bytes, name: str, readers: int
) -> BlockStore:
    from asyncllm.kv.store import BlockStore, slots_for

    if options.kv_store is None:
        raise OptionsError("kv_store: a path is needed")
    sizes = [group.block_bytes for group in pool.groups]
    return BlockStore(
        Path(options.kv_store).expanduser(),
        fingerprint=identity,
        name=name,
        block_tokens=options.block_tokens,
        extent_bytes=sizes,
        limit_bytes=options.kv_store_bytes,
        slots=pool.stage(slots_for(sizes)).slots,
        mode=options.kv_store_mode,
        reset=options.kv_store_reset,
        readers=readers,
    )


def _sizes(config: ModelConfig, backend: Backend) -> dict[str, Any]:
    """Which sizes of chunks are worth learning."""
    if backend.device == "cpu":
        return {}
    # A GPU is the faster, the more rows it has; but rings of windowed layers have room for a chunk.
    windowed = any(layer.window is not None for layer in config.layers)
    return {"largest": CHUNK_MAX if windowed else CHUNK_MAX_GPU, "largest_first": True}


def _kv_dtype(options: EngineOptions, backend: Backend) -> torch.dtype:
    import torch

    name = backend.kv_dtype if options.kv_dtype == "auto" else options.kv_dtype
    if name == "int8" and backend.device == "cpu":
        raise OptionsError(
            'kv_dtype="int8": not there yet on a CPU; accepted there is a floating-point type'
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _layer_groups(
    config: ModelConfig,
    options: EngineOptions,
    chunk: int,
    kv_dtype: torch.dtype,
    available: int | None,
) -> tuple[tuple[LayerGroup, ...], int]:
    """Layer groups with their capacities, and the context length that goes with them."""
    from asyncllm.kv.pool import layer_groups

    asked = options.context_length
    if asked is not None and asked > config.context_length:
        raise OptionsError(
            f"context_length={asked}: the model was made for {config.context_length} tokens"
        )
    context_length = asked or config.context_length
    groups = layer_groups(
        config,
        block_tokens=options.block_tokens,
        chunk=chunk,
        max_seqs=options.max_seqs,
        context_length=context_length,
        kv_bytes=options.kv_bytes,
        dtype=kv_dtype,
        available=available,
    )
    if asked is None:
        held = (g.capacity * options.block_tokens for g in groups if g.window is None)
        context_length = min([context_length, *held])
    return groups, context_length


def _check_vocabulary(checkpoint: Checkpoint, config: ModelConfig, tokens: int) -> None:
    # An embedding may be padded beyond the vocabulary, never short of it.
    if tokens > config.vocab_size:
        raise CorruptCheckpointError(
            f"{checkpoint.path}: the tokenizer has {tokens} tokens, "
            f"token_embd.weight only {config.vocab_size} rows"
        )


def _generation_defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Sampling parameters that the checkpoint ships; a value that is not accepted is an error."""
    found: dict[str, Any] = {}
    for key, name in DEFAULTS.items():
        if key in checkpoint.metadata:
            found[name] = checkpoint.get(key, int if name == "top_k" else float)
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise CorruptCheckpointError(f"{checkpoint.path}: general.sampling: {error}") from error
    return found


def _throwaway_steps(runner: Runner, pool: KvPool, rows: int) -> None:
    """A chunk and some decode steps into block 0, so that no request is the first.

    Nobody has been given a block yet; what is left there is not read before it is written.
    """
    params = SamplingParams().resolved({})
    spec = SamplingSpec(params, 0, 0, (0,) * rows, frozenset())
    blocks = -(-(rows + 1) // pool.block_tokens)
    tables = ((0,) * blocks,) * len(pool.groups)
    chunk = Row(-1, 0, 0, rows, spec.prompt_ids, False, tables, True, 0, spec)
    decode = replace(chunk, offset=rows, count=1, tokens=(0,), output_count=1)
    runner.collect(runner.submit(StepPlan((chunk,))))
    runner.tune(StepPlan((decode,)))
    runner.collect(runner.submit(StepPlan((decode,))))
    runner.collect(runner.submit(StepPlan((), released=(-1,))))


def _time_a_chunk(runner: Runner, pool: KvPool, chunk: ChunkPolicy, most: int) -> None:
    """Learn what computing a prompt takes, which reading it from a store is weighed against."""
    rows = min(chunk.maximum, most)
    params = SamplingParams().resolved({})
    spec = SamplingSpec(params, 0, 0, (0,) * rows, frozenset())
    tables = ((0,) * -(-rows // pool.block_tokens),) * len(pool.groups)
    row = Row(-1, 0, 0, rows, spec.prompt_ids, False, tables, False, 0, spec)
    for _ in range(CHUNKS_TIMED):
        seconds = runner.collect(runner.submit(StepPlan((row,)))).model_s
    chunk.observe(rows, 0, seconds)
    runner.collect(runner.submit(StepPlan((), released=(-1,))))


def _info(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: EngineOptions,
    backend: Backend,
    kv_dtype: torch.dtype,
    groups: tuple[LayerGroup, ...],
    context_length: int,
    stages: _Stages,
) -> ModelInfo:
    tensors = checkpoint.tensors.values()
    full = [g.capacity * options.block_tokens for g in groups if g.window is None]
    return ModelInfo(
        name=_name(checkpoint),
        architecture=checkpoint.architecture,
        parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        formats=dict(Counter(tensor.format.name for tensor in tensors).most_common()),
        weights_bytes=sum(tensor.nbytes for tensor in tensors),
        context_length=context_length,
        model_context_length=config.context_length,
        kv_ceiling_tokens=min([options.max_seqs * context_length, *full]),
        kv_ceiling_bytes=sum(group.capacity * group.block_bytes for group in groups),
        device=backend.device,
        dtype="float32",
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        backend=backend.name,
        backend_notes=tuple(backend.notes),
        deterministic=backend.deterministic,
        load_stages=tuple(stages.done),
    )
