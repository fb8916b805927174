"""`CpuProgram` gives the plain program's logits, always the same bits, or gives way to it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm import AsyncEngine
from asyncllm.checkpoint.checkpoint import open_checkpoint
from asyncllm.kernels import reference
from asyncllm.kernels.cpu import compiled, layers
from asyncllm.kernels.cpu import step as s
from asyncllm.kernels.cpu.compiled import KernelLibrary
from asyncllm.kernels.cpu.isa import Isa
from asyncllm.kernels.ops import REFERENCE_ROWS, Kernel, KernelTable
from asyncllm.kernels.reference import PackedWeight
from asyncllm.model.config import ModelConfig
from asyncllm.model.program import Chunk
from asyncllm.runner import cpu_weights
from asyncllm.runner.cpu_step import CpuProgram, refusal
from asyncllm.runner.cpu_weights import pack_model
from asyncllm.sampling.state import GREEDY
from asyncllm.scheduler.step import StepInterrupted
from tests import gguf_bytes
from tests.cpu_kernels import BEST, ISAS, directory, library, record, run_rows
from tests.gguf_bytes import BY_NAME, Typed
from tests.rig import Rig, assert_close, prompt
from tests.test_tokenizer import byte_level
from tests.tiny_models import TINY_MODELS, Tinies

LENGTH = 100
ODD = (1, 7, 30, 3, 64, 11)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For torch, which has nothing large to do here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> Tinies:
    return Tinies(tmp_path_factory.mktemp("tiny"))


def cpu_program(rig: Rig, isa: Isa = BEST, threads: int = 1) -> CpuProgram:
    return CpuProgram(
        rig.model,
        pack_model(rig.model, library(), 1),
        rig.pool,
        library=library(),
        isa=isa,
        vocab_size=rig.model.config.vocab_size,
        max_rows=rig.max_rows,
        max_sequences=rig.max_sequences,
        threads=threads,
        should_stop=rig.should_stop,
    )


Make = Callable[..., Rig]


@pytest.fixture
def cpu() -> Iterator[Make]:
    """Makes rigs of the CPU program, whose threads end with the test."""
    made: list[Rig] = []

    def new(path: Path, *, isa: Isa = BEST, threads: int = 1, **more: Any) -> Rig:
        options: dict[str, Any] = {
            "block_tokens": 16,
            "program": partial(cpu_program, isa=isa, threads=threads),
        }
        made.append(Rig(path, **(options | more)))
        return made[-1]

    yield new
    for rig in made:
        rig.program.close()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the bits are the same; the embedding's rows beyond the vocabulary do not count."""
    width = min(ours.shape[1], theirs.shape[1])
    return torch.equal(
        ours[:, :width].contiguous().view(torch.int32),
        theirs[:, :width].contiguous().view(torch.int32),
    )


# Checkpoints made by hand, in any format, with a vocabulary of text.


MIXED = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_1",
    "attn_output": "F16",
    "ffn_gate": "Q6_K",
    "ffn_up": "Q4_1",
    "ffn_down": "Q6_K",
}


@cache
def spread(name: str) -> float:
    """How large a format's random weights are under scales of 1."""
    layout = BY_NAME[name]
    raw = gguf_bytes.random_blocks(layout, 16, 512, np.random.default_rng(0), 1.0)
    values = torch.empty(16, 512)
    layout.unpack(torch.from_numpy(raw.copy()), values)
    return float(values.square().mean().sqrt())


def checkpoint(
    path: Path,
    formats: str | Mapping[str, str] = "Q8_0",
    *,
    arch: str = "llama",
    width: int = 64,
    inner: int = 96,
    head: int = 16,
    layers: int = 2,
    **metadata: Any,
) -> Path:
    """Four heads, two for K and V. `formats`: of all matrices, or by parts of their names."""
    words = byte_level()
    vocabulary = len(words["tokenizer.ggml.tokens"])
    entries: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": width,
        f"{arch}.block_count": layers,
        f"{arch}.feed_forward_length": inner,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.value_length": head,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    entries |= {f"{arch}.{name}": value for name, value in metadata.items()}
    kinds = {str: "string", int: "int32", float: "float32"}
    entries |= {
        name: Typed(kinds[type(value[0])], value) if isinstance(value, list) else value
        for name, value in words.items()
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, width),
        "output_norm.weight": (width,),
    }
    for index in range(layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q": (4 * head, width),
            "attn_k": (2 * head, width),
            "attn_v": (2 * head, width),
            "attn_output": (width, 4 * head),
            "ffn_norm": (width,),
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in of_layer.items()}
    rng = np.random.default_rng(0)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            raw = (1 + 0.2 * rng.standard_normal(shape)).astype(np.float32).view(np.uint8)
            tensors[name] = ("F32", shape, raw.tobytes())
            continue
        kind = formats if isinstance(formats, str) else formats["token_embd"]
        if not isinstance(formats, str):
            kind = next((form for part, form in formats.items() if part in name), kind)
        scale = 1 / (spread(kind) * shape[1] ** 0.5)
        raw = gguf_bytes.random_blocks(BY_NAME[kind], shape[0], shape[1], rng, scale)
        tensors[name] = (kind, shape, raw.tobytes())
    path.write_bytes(gguf_bytes.gguf(entries, tensors))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several formats in one model, heads wide enough to be quantised where they are computed."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return checkpoint(path, MIXED, width=256, inner=256, head=64)


# Logits


SERVED = [name for name in TINY_MODELS if name != "mistral"]


@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_of_the_plain_program(tinies: Tinies, cpu: Make, name: str) -> None:
    tokens, path = prompt(LENGTH), tinies.path(name)
    expected = Rig(path, block_tokens=16, chunk=64).logits(tokens, ODD)
    ours = cpu(path, chunk=64).logits(tokens, ODD)
    assert_close(ours[:, : expected.shape[1]], expected, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_and_values_in_half_precision_are_those_of_the_plain_program(
    tinies: Tinies, cpu: Make, dtype: torch.dtype
) -> None:
    tokens, path = prompt(LENGTH), tinies.path("gemma3")
    expected = Rig(path, block_tokens=16, chunk=64, dtype=dtype).logits(tokens, ODD)
    ours = cpu(path, chunk=64, dtype=dtype).logits(tokens, ODD)
    # A number next to the middle between two of half precision may fall to either.
    assert_close(ours[:, : expected.shape[1]], expected, torch.finfo(dtype).eps)


def rounded_linear(x: Tensor, weight: PackedWeight, scratch: Tensor, out: Tensor) -> None:
    """The plain product with the activations that the kernels compute with."""
    chunks = x.reshape(len(x), -1, 32)
    scales = chunks.abs().amax(-1, keepdim=True) / 127
    whole = torch.where(scales > 0, (chunks / scales).round(), 0.0)
    reference.linear(whole.mul_(scales).flatten(-2), weight, scratch, out)


ROUNDED = KernelTable(
    [
        Kernel(
            "linear", "rounded", rounded_linear, formats=frozenset(BY_NAME) - {"F32", "F16", "BF16"}
        ),
        *REFERENCE_ROWS,
    ]
)


@pytest.mark.parametrize("formats", ["Q8_0", "F16", "IQ2_XS", MIXED], ids=str)
def test_packed_weights_give_the_plain_program_s_logits_but_for_the_rounding_to_int8(
    tmp_path: Path, cpu: Make, formats: str | dict[str, str]
) -> None:
    path = checkpoint(tmp_path / "m.gguf", formats, width=256, inner=256, head=64)
    tokens = prompt(LENGTH)
    ours = cpu(path).logits(tokens, (LENGTH,))
    errors = []
    for table in (None, ROUNDED):
        expected = Rig(path, block_tokens=16, kernels=table).logits(tokens, (LENGTH,))
        error = (ours[:, : expected.shape[1]] - expected).norm() / expected.norm()
        errors.append(error.item())
    if formats == "F16":
        assert max(errors) < 1e-5
        return
    assert errors[0] < 5e-2
    # What is left: a number next to the middle between two integers may fall to either.
    assert errors[1] < min(1.5e-2, errors[0] / 2)


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_logits_have_the_same_bits_for_any_size_of_blocks(
    tinies: Tinies, cpu: Make, block_tokens: int
) -> None:
    tokens, path = prompt(LENGTH), tinies.path("gemma3")
    ours = cpu(path, chunk=33, block_tokens=block_tokens).logits(tokens, (33, 2))
    assert same(ours, cpu(path, chunk=33).logits(tokens, (33, 2)))


# The same bits


@pytest.fixture(params=["gemma3", "mistral-wide", "gemma2", "small", "mixed"])
def model_path(request: pytest.FixtureRequest) -> Path:
    if request.param in TINY_MODELS:
        tinies: Tinies = request.getfixturevalue("tinies")
        return tinies.path(request.param)
    path: Path = request.getfixturevalue(request.param)
    return path


HALF: dict[str, Any] = {"dtype": torch.float16}


def test_bits_do_not_depend_on_chunks(model_path: Path, cpu: Make) -> None:
    tokens = prompt(LENGTH)
    expected = cpu(model_path, **HALF).logits(tokens, (LENGTH,))
    for sizes in ((1,), (16,), ODD, (99, 1)):
        assert same(cpu(model_path, chunk=max(sizes), **HALF).logits(tokens, sizes), expected)


def test_bits_do_not_depend_on_the_threads(model_path: Path, cpu: Make) -> None:
    tokens = prompt(LENGTH)
    expected = cpu(model_path, **HALF).logits(tokens, ODD)
    for threads in (2, 3):
        assert same(cpu(model_path, threads=threads, **HALF).logits(tokens, ODD), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_company(model_path: Path, cpu: Make, threads: int) -> None:
    rig = cpu(model_path, threads=threads, sequences=9, **HALF)
    prompts = [prompt(LENGTH - 8 * i, i) for i in range(5)]
    alone = [cpu(model_path, **HALF).logits(tokens, (LENGTH,)) for tokens in prompts]
    tables = [rig.sequence(LENGTH) for _ in prompts]
    done, turn = [0] * len(prompts), 0
    while any(at < len(tokens) for at, tokens in zip(done, prompts, strict=True)):
        turn += 1
        chunks, owners = [], []
        for i in range(turn % 3, len(prompts) + turn % 3):
            owner = i % len(prompts)  # so that a sequence's place in the pass changes
            left = len(prompts[owner]) - done[owner]
            size = min((17, 1, 40, 1)[(owner + turn) % 4], left)
            if size:
                part = prompts[owner][done[owner] : done[owner] + size]
                chunks.append(Chunk(part, done[owner], tables[owner]))
                owners.append((owner, done[owner]))
                done[owner] += size
        found = torch.split(rig.run(chunks), [len(chunk.tokens) for chunk in chunks])
        for (owner, start), rows in zip(owners, found, strict=True):
            assert same(rows, alone[owner][start : start + len(rows)])


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_bits_do_not_depend_on_the_instructions(small: Path, cpu: Make, isa: Isa) -> None:
    tokens = prompt(LENGTH)
    ours = cpu(small, isa=isa, **HALF).logits(tokens, ODD)
    assert same(ours, cpu(small, **HALF).logits(tokens, ODD))


def test_logits_made_in_the_pass_are_those_made_after_it(small: Path, cpu: Make) -> None:
    rig = cpu(small)
    tokens, tables = prompt(40), rig.sequence(40)
    after = rig.run([Chunk(tokens, 0, tables)])
    wanted = [39, 0, 17, 17]
    with torch.inference_mode():
        rig.program.forward([Chunk(tokens, 0, tables)], wanted, [GREEDY] * 4)
        chosen = rig.program.choices(wanted, [GREEDY] * 4)
        within = rig.program.logits(wanted).clone()
        one = rig.program.choices([5], [GREEDY])
    assert same(within, after[wanted])
    width = rig.model.config.vocab_size
    for (token, logit), row in zip([*chosen, *one], after[[*wanted, 5], :width], strict=True):
        assert token == int(row.argmax())
        assert logit == float(row[token])


def test_only_tokens_of_the_vocabulary_are_chosen(small: Path, cpu: Make) -> None:
    def few(rig: Rig) -> CpuProgram:
        return CpuProgram(
            rig.model,
            pack_model(rig.model, library(), 1),
            rig.pool,
            library=library(),
            isa=BEST,
            vocab_size=5,
            max_rows=rig.max_rows,
            max_sequences=1,
            threads=1,
        )

    rig = cpu(small, program=few)
    tables = rig.sequence(40)
    logits = rig.run([Chunk(prompt(40), 0, tables)])
    with torch.inference_mode():
        found = rig.program.choices(range(32), [GREEDY] * 32)
    assert [token for token, _ in found] == logits[:32, :5].argmax(1).tolist()
    assert (logits.argmax(1) >= 5).any()


# Limits


@pytest.mark.parametrize(
    ("changes", "block_tokens", "reason"),
    [
        ({}, 16, None),
        ({}, 48, None),
        ({"head_dim": 24}, 16, "head width 24 is no multiple of 16"),
        ({"embedding": 72}, 16, "embedding width 72 is no multiple of 16"),
        ({"feed_forward": 100}, 16, "feed-forward width 100 is no multiple of 16"),
        ({}, 8, "block_tokens 8 is no multiple of 16"),
        ({}, 24, "block_tokens 24 is no multiple of 16"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_reason(
    small: Path, changes: dict[str, int], block_tokens: int, reason: str | None
) -> None:
    with open_checkpoint(small) as opened:
        config = replace(ModelConfig.from_checkpoint(opened), **changes)  # type: ignore[arg-type]
    assert refusal(config, block_tokens) == reason


def test_a_pass_of_too_many_rows_or_none_is_refused(small: Path, cpu: Make) -> None:
    rig = cpu(small, chunk=8)
    for size in (0, 9):
        with pytest.raises(ValueError, match=rf"a pass of {size} rows; room is for 1 to 8"):
            rig.run([Chunk([1] * size, 0, rig.sequence(9))])


def test_a_long_step_is_interrupted_between_layers(tinies: Tinies, cpu: Make) -> None:
    asked: list[bool] = []
    stop = False

    def should_stop() -> bool:
        asked.append(True)
        return stop and len(asked) == 4

    rig = cpu(tinies.path("gemma3"), should_stop=should_stop)
    tokens, tables = prompt(20), rig.sequence(20)
    expected = rig.run([Chunk(tokens, 0, tables)])
    assert not asked, "a short step is not looked after"
    rig.program._seconds_per_row_and_layer = 1e6
    assert same(rig.run([Chunk(tokens, 0, tables)]), expected)
    assert len(asked) == 6, "between its 7 layers"
    asked.clear()
    stop = True
    rig.program._seconds_per_row_and_layer = 1e6
    with pytest.raises(StepInterrupted, match="before layer 4"):
        rig.run([Chunk(tokens, 0, tables)])
    assert same(rig.run([Chunk(tokens, 0, tables)]), expected)


def test_packing_ends_with_what_on_tiles_raises(small: Path, cpu: Make) -> None:
    rig = cpu(small)

    def stop(nbytes: int) -> None:
        assert nbytes > 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_model(rig.model, library(), 2, stop)
    assert not [t for t in threading.enumerate() if t.name.startswith("asyncllm-packing")]


def test_packing_counts_the_checkpoint_s_bytes_once(small: Path, cpu: Make) -> None:
    seen: list[int] = []
    rig = cpu(small)
    pack_model(rig.model, library(), 1, seen.append)
    with open_checkpoint(small) as opened:
        matrices = [info.nbytes for info in opened.tensors.values() if len(info.shape) == 2]
    assert sorted(seen) == sorted(matrices)
    assert rig.program.weights_bytes >= sum(matrices)


def test_closing_ends_the_threads_and_may_be_repeated(small: Path, cpu: Make) -> None:
    before = workers()
    rig = cpu(small, threads=3)
    assert workers() == before + 2
    for _ in range(2):
        rig.program.close()
        assert workers() == before


def workers() -> int:
    return sum(thread.name.startswith("asyncllm-worker") for thread in threading.enumerate())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say")
def test_a_thousand_decode_steps_take_no_more_memory(small: Path, cpu: Make) -> None:
    rig = cpu(small, threads=2, **HALF)
    tables = rig.sequence(256)
    numpy_only = [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]

    def decode(steps: int) -> None:
        for position in range(steps):
            rig.program.forward([Chunk([position % 99], position % 256, tables)], [0], [GREEDY])
            rig.program.choices([0], [GREEDY])
            rig.program.logits([0])

    def held() -> int:
        snapshot = tracemalloc.take_snapshot().filter_traces(numpy_only)
        return sum(trace.size for trace in snapshot.traces)

    with torch.inference_mode():
        tracemalloc.start()
        try:
            decode(300)
            before, resident = held(), resident_bytes()
            decode(1000)
            assert held() == before
        finally:
            tracemalloc.stop()
        assert resident_bytes() - resident < 1 << 20


# Compiled kernels


def angles(library: KernelLibrary) -> int:
    return library.address("angles", layers.angles)


def works(address: int) -> bool:
    """Calls the kernel for one position."""
    out = np.zeros((1, 8), np.float32)
    words = record(
        s.ANGLES,
        **{"positions": np.array([3]), "frequencies": np.ones(4), "scale": 1.0, "half": 4},
        **{"out": out, "stride": 32},
    )
    run_rows(ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address), words, 1)
    return bool(np.allclose(out, [np.cos(3)] * 4 + [np.sin(3)] * 4))


def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    first = KernelLibrary(tmp_path, lambda name, count: told.append((name, count)))
    address = angles(first)
    assert angles(first) == address
    first.address("norm", layers.norm)
    assert first.compiled == ["angles", "norm"]
    assert told == [("angles", 1), ("norm", 2)]
    second = KernelLibrary(tmp_path, lambda name, count: told.append((name, count)))
    assert works(angles(second))
    assert second.compiled == [] and len(told) == 2


def test_a_damaged_kernel_is_compiled_anew(tmp_path: Path) -> None:
    angles(KernelLibrary(tmp_path))
    [path] = tmp_path.rglob("angles.kernel")
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (b"", whole[:10], whole[:-1], whole + b"x", bytes(flipped), bytes(len(whole))):
        path.write_bytes(damaged)
        library = KernelLibrary(tmp_path)
        assert works(angles(library))
        assert library.compiled == ["angles"]
        again = KernelLibrary(tmp_path)
        assert works(angles(again))
        assert again.compiled == [], "the file is whole again"
    assert [p.name for p in path.parent.iterdir()] == ["angles.kernel"], "no parts are left"


def test_where_nothing_can_be_kept_kernels_still_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cpu-kernels").write_text("in the way")
    library = KernelLibrary(tmp_path)
    with caplog.at_level(logging.DEBUG, logger="asyncllm"):
        assert works(angles(library))
    assert library.compiled == ["angles"]
    assert "kernel-not-kept" in caplog.text


def test_other_sources_have_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    angles(KernelLibrary(tmp_path))
    monkeypatch.setattr(compiled, "_sources", lambda: "others")
    library = KernelLibrary(tmp_path)
    assert works(angles(library))
    assert library.compiled == ["angles"]
    assert len(list((tmp_path / "cpu-kernels").iterdir())) == 2


def test_several_threads_compile_a_kernel_once(tmp_path: Path) -> None:
    library, found = KernelLibrary(tmp_path), []
    threads = [threading.Thread(target=lambda: found.append(angles(library))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4
    assert library.compiled == ["angles"]


# Whole engines


PROMPTS = ["hello world", "us and them", "12 and 21 and 12"]
OPTIONS: dict[str, Any] = {"max_seqs": 3, "threads": 1, "context_length": 128, "chunk": 32}


def load(path: Path, **more: Any) -> Any:
    return AsyncEngine.load(path, **({"tune_dir": directory()} | OPTIONS | more))


async def texts(engine: AsyncEngine, **more: Any) -> list[tuple[int, ...]]:
    options = {"max_tokens": 20, "temperature": 0, "ignore_eos": True} | more
    generations = [engine.generate(text, **options) for text in PROMPTS]
    return [(await generation).token_ids for generation in generations]


async def test_an_engine_computes_with_kernels_and_says_so(small: Path) -> None:
    async with load(small) as engine:
        info = engine.info
        assert info.backend == f"numba {BEST.name.lower().replace('_', '-')}"
        assert info.deterministic is True
        assert info.kv_dtype == "float16"
        assert info.backend_notes == ()
        assert {"backend", "kernels"} <= {stage.name for stage in info.load_stages}
        together = await texts(engine)
        seeded = await texts(engine, temperature=1.0, seed=3)
    async with load(small, threads=2, chunk=5, max_seqs=1, prefix_cache=False) as engine:
        assert await texts(engine) == together
        assert await texts(engine, temperature=1.0, seed=3) == seeded
    assert len(set(together)) == 3


async def test_loading_again_in_the_same_process_compiles_nothing(small: Path) -> None:
    before = workers()
    stages: list[list[str]] = []
    for _ in range(2):
        seen: list[str] = []
        async with load(
            small, threads=2, on_progress=lambda r, s=seen: s.append(r.stage)
        ) as engine:
            assert before < workers() <= before + 2  # the caller is one where no core is left
            assert len(await texts(engine)) == 3
        assert workers() == before
        stages.append(seen)
    assert not [name for name in stages[1] if name.startswith("compiling")]


def no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.runner.backend.find_spec", lambda name: None)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise NotImplementedError("an instruction nobody knows")

    monkeypatch.setattr(layers, "attention", broken)


def no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("weights of another world")

    monkeypatch.setattr("asyncllm.runner.cpu_weights.pack", broken)


def nothing(monkeypatch: pytest.MonkeyPatch) -> None: ...


FALLS_BACK = pytest.mark.parametrize(
    ("prepare", "options", "shape", "reason"),
    [
        pytest.param(no_numba, {}, {}, r'pip install "asyncllm\[cpu\]"', id="no-numba"),
        pytest.param(nothing, {"widen_weights": True}, {}, "widen_weights=True", id="widened"),
        pytest.param(nothing, {}, {"head": 24}, "head width 24 is no multiple", id="head-width"),
        pytest.param(
            nothing, {"block_tokens": 8}, {}, "block_tokens 8 is no multiple", id="blocks"
        ),
        pytest.param(no_compiler, {}, {}, "kernels cannot be compiled: .*nobody", id="compiler"),
        pytest.param(no_packing, {}, {}, "repacked: weights of another world", id="packing"),
    ],
)


@FALLS_BACK
async def test_what_kernels_cannot_serve_falls_back_to_torch_with_a_note(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    shape: dict[str, Any],
    reason: str,
) -> None:
    path = checkpoint(tmp_path / "m.gguf", **shape)
    before = workers()
    prepare(monkeypatch)
    async with load(path, **options) as engine:
        info = engine.info
        assert info.backend == "plain torch"
        assert info.deterministic is False
        assert len(info.backend_notes) == 1
        assert re.search(reason, info.backend_notes[0]), info.backend_notes
        assert workers() == before
        found = await texts(engine)
    assert all(len(ids) == 20 for ids in found)


@pytest.mark.parametrize(
    "prepare",
    [
        no_numba,
        no_compiler,
        no_packing,
    ],
)
async def test_an_engine_that_fell_back_says_how_keys_and_values_are_kept(
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[pytest.MonkeyPatch], None],
) -> None:
    prepare(monkeypatch)
    async with load(small) as engine:
        await texts(engine)
        stats = engine.stats()
        element = {"float16": 2, "float32": 4}[engine.info.kv_dtype]
        # K and V of two layers with two heads of 16.
        assert stats.kv_pool_bytes == stats.kv_blocks_total * 16 * 2 * 2 * 2 * 16 * element


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint with one infinite scale in a format that kernels only have as integers."""
    path = checkpoint(tmp_path / "m.gguf", "IQ2_XS", width=256, inner=256, head=64)
    content = bytearray(path.read_bytes())
    with open_checkpoint(path) as opened:
        raw = opened.tensors["blk.1.ffn_up.weight"].packed().numpy().tobytes()
    start = content.index(raw)
    content[start : start + 2] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(content)
    return path


async def test_damaged_weights_of_a_rare_format_fall_back_too(damaged: Path) -> None:
    async with load(damaged) as engine:
        assert engine.info.backend == "plain torch"
        assert "IQ2_XS: weights that are no integers times a scale" in engine.info.backend_notes[0]


async def test_a_load_that_is_given_up_while_packing_leaves_no_thread(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = threading.Event()
    real = vars(cpu_weights)["pack"]

    def slow(*arguments: Any) -> None:
        packing.set()
        time.sleep(0.05)
        real(*arguments)

    monkeypatch.setattr(cpu_weights, "pack", slow)
    before = threading.active_count()
    task = asyncio.ensure_future(load(small)._load())
    while not packing.is_set():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("asyncllm-packing", "asyncllm-worker"))]
    assert threading.active_count() <= before + 1


async def test_an_engine_says_when_its_kernels_cannot_be_kept(small: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    told: list[tuple[str, float]] = []
    async with load(
        small,
        tune_dir=in_the_way,
        on_progress=lambda report: told.append((report.stage, report.fraction)),
    ) as engine:
        assert engine.info.backend.startswith("numba")
        assert "cannot be kept" in " ".join(engine.info.backend_notes)
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert any(stage.startswith("compiling") for stage, _ in told)
    assert told[-1][0] == "ready"  # also after closing
