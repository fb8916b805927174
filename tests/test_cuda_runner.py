"""The device's program and runner, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

# Triton looks at it when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
pytest.importorskip("triton", reason="the GPU backend's kernels need triton")

from asyncllm import synthetic
from asyncllm.checkpoint.checkpoint import open_checkpoint
from asyncllm.kv.blocks import KvCache
from asyncllm.kv.pool import KvPool, layer_groups
from asyncllm.model.causal_lm import CausalLM
from asyncllm.model.config import ModelConfig
from asyncllm.model.program import Chunk, PlainProgram
from asyncllm.options import SamplingParams
from asyncllm.runner import cuda_step
from asyncllm.runner.chunk_passes import ChunkPasses, rounded
from asyncllm.runner.cuda_step import CudaProgram, refusal
from asyncllm.runner.device_model import DeviceModel
from asyncllm.runner.pipeline import CudaRunner
from asyncllm.scheduler.chunking import ChunkPolicy
from asyncllm.scheduler.request import Request
from asyncllm.scheduler.scheduler import NoPlan, Scheduler
from tests.tiny_models import CONTEXT, TINY_MODELS, VOCABULARY, build, write_gguf

# numpy, under the interpreter, warns of what a GPU does not mind.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
BLOCK_TOKENS = 16
MAX_SEQS = 2
CHUNK = 24


class Device:
    """A tiny model on the device, with all that serves it."""

    def __init__(
        self,
        path: Path,
        kv_dtype: torch.dtype = torch.float16,
        *,
        kind: type[CudaProgram] = CudaProgram,
        chunk: int = CHUNK,
    ) -> None:
        with open_checkpoint(path) as checkpoint:
            config = ModelConfig.from_checkpoint(checkpoint)
            assert refusal(config, BLOCK_TOKENS) is None
            self.model = CausalLM.bind(checkpoint, config)
        groups = layer_groups(
            config,
            block_tokens=BLOCK_TOKENS,
            chunk=chunk,
            max_seqs=MAX_SEQS,
            context_length=CONTEXT,
            kv_bytes=1 << 40,
            dtype=kv_dtype,
        )
        pool = KvPool(
            groups,
            block_tokens=BLOCK_TOKENS,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=kv_dtype,
            device=str(DEVICE),
        )
        self.pool = pool
        self.program = kind(
            self.model,
            DeviceModel(self.model, DEVICE),
            pool,
            device=DEVICE,
            vocab_size=VOCABULARY,
            max_rows=chunk + MAX_SEQS,
            max_batch=MAX_SEQS,
            slots=2 * MAX_SEQS,
            pdl=False,
        )
        self.runner = CudaRunner(self.program, pool, vocab_size=VOCABULARY, slots=2 * MAX_SEQS)
        cache = KvCache(
            groups,
            block_tokens=BLOCK_TOKENS,
            max_chunk=chunk,
            grow=self.grow,
            fingerprint=b"tiny",
            prefix_cache=True,
        )
        self.scheduler = Scheduler(
            cache,
            max_seqs=MAX_SEQS,
            context_length=CONTEXT,
            chunk=ChunkPolicy(chunk, 1e9),
            decode_refusal=self.runner.decode_refusal,
        )
        self.modes: set[str] = set()

    def grow(self, group: int, blocks: int) -> int:
        """Blocks with NaN in them: what nobody has written must not be read."""
        first = self.pool.granted[group]
        granted = self.runner.grow(group, blocks)
        for layer in self.pool.groups[group].layers:
            parts = (self.pool.keys[layer], self.pool.values[layer])
            for buffer in self.pool.scales.get(layer, parts):
                buffer[first : first + granted] = torch.nan
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # the runner has a stream of its own
        return granted

    def request(self, prompt: Sequence[int], seed: int = 0, **params: object) -> Request:
        given = {"max_tokens": 4, "ignore_eos": True, "temperature": 0} | params
        sampling = SamplingParams().updated(given).resolved({})
        request = Request("r", prompt, sampling, seed=seed, end_ids=frozenset())
        self.scheduler.add(request)
        return request

    def run(self, *, ahead: bool) -> None:
        """All steps, each submitted before the one before it is read, or after."""
        outstanding = None
        while self.scheduler.has_work or outstanding is not None:
            plan = self.scheduler.plan()
            if isinstance(plan, NoPlan):
                assert outstanding is not None
                self.scheduler.commit(self.runner.collect(outstanding), {})
                outstanding = None
                continue
            self.modes.add(plan.decode_mode)
            ticket = self.runner.submit(plan)
            if outstanding is not None:
                self.scheduler.commit(self.runner.collect(outstanding), {})
            outstanding = ticket
            if not ahead:
                self.scheduler.commit(self.runner.collect(ticket), {})
                outstanding = None


def checkpoint(folder: Path, name: str) -> Path:
    tiny = TINY_MODELS[name]
    return write_gguf(build(tiny), tiny, folder / f"{name}.gguf")


def ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def plain_logits(model: CausalLM, tokens: Sequence[int]) -> torch.Tensor:
    config = model.config
    groups = layer_groups(
        config,
        block_tokens=BLOCK_TOKENS,
        chunk=CONTEXT,
        max_seqs=1,
        context_length=CONTEXT,
        kv_bytes=1 << 40,
        dtype=torch.float32,
    )
    pool = KvPool(
        groups,
        block_tokens=BLOCK_TOKENS,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )
    program = PlainProgram(model, pool, max_rows=CONTEXT, max_logits=4)
    tables = [range(group.capacity) for group in groups]
    with torch.inference_mode():
        program.forward([Chunk(tokens, 0, tables)])
        return program.logits([len(tokens) - 1])[0].clone()


# In the interpreter each takes half a minute; a GPU runs them all.
FAMILIES = ["gemma3"] if DEVICE.type == "cpu" else ["llama", "qwen3", "gemma3", "phi3-partial"]
LIMITS = [cuda_step.TENSOR_ROWS, 16]  # of rows on tensor cores; the rest is a dense product
KINDS = [(name, most, torch.float16, 0.03) for name in FAMILIES for most in LIMITS]
KINDS += [(name, LIMITS[0], torch.int8, 0.04) for name in FAMILIES[1:] or ["qwen3"]]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "most", "kv_dtype", "tolerance"), KINDS)
def test_logits_of_a_prompt_are_the_plain_ones(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    most: int,
    kv_dtype: torch.dtype,
    tolerance: float,
) -> None:
    monkeypatch.setattr(cuda_step, "TENSOR_ROWS", most)
    device = Device(checkpoint(tmp_path, name), kv_dtype)
    tokens = ids(20, 1)
    request = device.request(tokens, max_tokens=2)
    device.run(ahead=False)
    # What decoding left is the second token's logits.
    output = request.sequences[0].output_ids
    found = device.program.logits[0, :VOCABULARY].float().cpu()
    expected = plain_logits(device.model, [*tokens, output[0]])[:VOCABULARY]
    error = (found - expected).norm() / expected.norm()
    assert error < tolerance, error
    assert int(found.argmax()) == output[1]


@pytest.mark.timeout(400)
def test_one_step_ahead_and_in_turn_give_the_same_tokens(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "llama")
    outputs = []
    for ahead in (False, True):
        device = Device(path)
        requests = [
            device.request(ids(3, 2), max_tokens=3),
            device.request(ids(2, 3), max_tokens=2, logprobs=1),  # chosen on the host
        ]
        if DEVICE.type == "cuda":  # interpreted it takes minutes
            requests.append(device.request(ids(7, 4), temperature=1.0, top_k=20, seed=7))
        device.run(ahead=ahead)
        outputs.append([request.sequences[0].output_ids for request in requests])
        assert all(request.sequences[0].error is None for request in requests)
        assert device.scheduler.cache.blocks_used == 0
        assert {"plain", "pipelined"} <= device.modes  # beside one of the host's, and alone
    assert outputs[0] == outputs[1]


def test_rows_and_sequences_that_pad_a_pass_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cuda":
        path = tmp_path / "m.gguf"
        synthetic.write("tiny-q4_k_m", path)
    else:  # interpreted it would take minutes
        path = checkpoint(tmp_path, "llama")
    outputs, sizes = [], set()
    for pads in (False, True):

        def size(self: Any, rows: int, sequences: int, pads: bool = pads) -> tuple[int, int]:
            found = (rounded(rows), 4) if pads else (rows, sequences)
            sizes.add(found)
            return found

        monkeypatch.setattr(ChunkPasses, "size", size)
        device = Device(path)
        requests = [device.request(ids(count, count), max_tokens=2) for count in (3, 5)]
        device.run(ahead=False)
        outputs.append([request.sequences[0].output_ids for request in requests])
    assert outputs[0] == outputs[1]
    assert {(8, 2), (16, 4)} <= sizes


def test_sizes_of_passes_are_few_and_little_larger() -> None:
    sizes = {rounded(count) for count in range(1, 2049)}
    assert len(sizes) < 40
    assert all(count <= rounded(count) < count + 32 for count in range(1, 257))
    assert all(count <= rounded(count) <= count * 9 / 8 for count in range(257, 2049))


def test_a_product_that_fails_is_replaced_and_the_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "packed.gguf"
    synthetic.write("tiny-q4_k_m", path)
    whole = Device(path)
    wanted = whole.request(ids(6, 1), max_tokens=1)
    whole.run(ahead=False)
    found = whole.program.logits[0, :VOCABULARY].float().cpu()
    expected = plain_logits(whole.model, ids(6, 1))[:VOCABULARY]
    assert (found - expected).norm() / expected.norm() < 0.03

    from asyncllm.kernels.cuda import tensor_cores

    plain, tried = tensor_cores.tensor_rows, []

    def failing(weight: Any, *args: Any, config: Any = None, **how: Any) -> None:
        if config is None:
            tried.append(weight.form)
            raise RuntimeError("it does not compile")
        plain(weight, *args, config=config, **how)

    def default(weight: Any, rows: int, *, plain: bool = False) -> Any:
        return (*tensor_cores.tensor_default(weight, rows, plain=True)[:-1], 0 if plain else 3)

    monkeypatch.setattr(cuda_step, "tensor_rows", failing)
    monkeypatch.setattr(cuda_step, "tensor_default", default)
    device = Device(path)
    request = device.request(ids(6, 1), max_tokens=1)
    device.run(ahead=False)
    assert request.sequences[0].output_ids == wanted.sequences[0].output_ids
    assert sorted(tried) == sorted(set(tried)) != []  # each format once
    assert device.scheduler.launch_failures == len(tried)
