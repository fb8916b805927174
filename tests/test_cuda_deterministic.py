"""`deterministic=True` on a GPU: a row's bits are the same whatever it is computed with.

Triton's interpreter leaves products to numpy, where they may depend on the rows beside; there the
same is tested up to rounding.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

# Triton looks at it when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
pytest.importorskip("triton", reason="the GPU backend's kernels need triton")

from asyncllm import AsyncEngine, Completion, synthetic
from asyncllm.kernels.cuda.float_rows import float_partial_sums, float_rows
from asyncllm.kernels.cuda.tensor_cores import most_partial_sums, tensor_rows
from asyncllm.kernels.cuda.weights import unpacked, upload
from asyncllm.runner import steady
from asyncllm.runner.steady import AS_ROWS, SteadyProgram
from scripts import quantise_q4_0
from tests.cuda_weights import BY_NAME, random_rows
from tests.test_cuda_runner import DEVICE, Device, checkpoint, ids, plain_logits
from tests.tiny_models import VOCABULARY

# numpy, under the interpreter, warns of what a GPU does not mind.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")

SHAPE = "tiny-q4_k_m"
TOKENS = 120
BLOCK_TOKENS = 16


def same(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Equal to the bit; interpreted up to `tolerance` times the largest."""
    if DEVICE.type == "cuda":
        return torch.equal(found, expected)
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


# Products.


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(
    ("name", "columns"), [("F16", 96), ("F16", 608), ("BF16", 576), ("F32", 288)]
)
def test_products_of_floats_are_right(name: str, columns: int, rows: int) -> None:
    # The interpreter cuts bfloat16 off where a GPU rounds; tensor cores do so with float32.
    outputs, rough = 70, "BF16" if DEVICE.type == "cpu" else "F32"
    weight = upload(BY_NAME[name], random_rows(BY_NAME[name], outputs, columns), columns, DEVICE)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    out = torch.full((rows + 1, outputs + 3), float("nan"), device=DEVICE)
    partial = torch.full((float_partial_sums([weight], rows),), float("nan"), device=DEVICE)
    assert (partial.numel() > 0) is (columns > 96)  # some share the columns of a row out
    float_rows(weight, x.to(DEVICE), out, partial, bias=bias.to(DEVICE), out_offset=2)
    rounded = x.to(weight.planes["values"].dtype).double()
    expected = rounded @ unpacked(weight).double().cpu().t() + bias.double()
    written = out[:rows, 2 : 2 + outputs].double().cpu()
    most = 1e-2 if name == rough else 2e-5
    assert (written - expected).abs().max() < most * expected.abs().max()
    assert int(out.isnan().sum()) == out.numel() - expected.numel()


def test_products_of_floats_refuse_what_does_not_fit() -> None:
    weight = upload(BY_NAME["F16"], random_rows(BY_NAME["F16"], 70, 576), 576, DEVICE)
    x, none = torch.zeros(4, 576, device=DEVICE), torch.zeros(0, device=DEVICE)
    sums = torch.zeros(float_partial_sums([weight], 4), device=DEVICE)
    with pytest.raises(ValueError, match="does not go into"):
        float_rows(weight, x, torch.zeros(4, 69, device=DEVICE), sums)
    with pytest.raises(ValueError, match="0 partial sums"):
        float_rows(weight, x, torch.zeros(4, 70, device=DEVICE), none)


@pytest.mark.parametrize(
    ("name", "outputs", "columns"),
    [
        *(("Q4_K", 192, 768), ("Q6_K", 70, 2048), ("Q8_0", 70, 576), ("Q5_1", 130, 1024)),
        *(("IQ4_NL", 70, 288), ("F16", 70, 608), ("BF16", 192, 768), ("F32", 70, 288)),
    ],
)
def test_a_row_of_a_product_is_the_same_among_any_others(
    name: str, outputs: int, columns: int
) -> None:
    layout = BY_NAME[name]
    weight = upload(layout, random_rows(layout, outputs, columns), columns, DEVICE)
    most = 100 if DEVICE.type == "cuda" else 40
    x = torch.randn(most, columns, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    # A row that a larger one stands beside, and one that is nothing but NaN.
    x[1] *= 1000
    x[2] = float("nan")

    def product(some: Tensor) -> Tensor:
        out = torch.full((len(some), outputs), float("nan"), device=DEVICE)
        if weight.layout is None:
            partial = torch.zeros(float_partial_sums([weight], len(some)), device=DEVICE)
            float_rows(weight, some, out, partial)
        else:
            sums = most_partial_sums([weight], len(some), as_rows=AS_ROWS)
            partial = torch.zeros(sums, device=DEVICE)
            tensor_rows(weight, some.half(), out, partial, as_rows=AS_ROWS)
        return out

    whole = product(x)
    assert bool(whole[2].isnan().all())
    assert not bool(whole[torch.arange(most) != 2].isnan().any())
    sound = [row for row in (0, 1, 3, 17, 31, 32, most - 1) if row < most]
    for row in sound:
        assert same(product(x[row : row + 1])[0], whole[row], 1e-5), row
    for count in (5, 8, 33, 64):
        if count < most:
            # Other rows beside it, and another place among them.
            part = product(x[most - count :])
            assert same(part[3:], whole[most - count + 3 :], 1e-5), count


# Steps.

# Of tiny models with float weights; in the interpreter each takes half a minute.
FAMILIES = ["gemma3"] if DEVICE.type == "cpu" else ["llama", "qwen3", "gemma3", "phi3-partial"]
SMALL = synthetic.Shape(1, 256, 512, 4, 2, 64, 128, False)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*FAMILIES, "packed"])
def test_logits_do_not_depend_on_chunks_and_are_the_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(steady, "PASS_ROWS", 8)
    if name == "packed":
        monkeypatch.setitem(synthetic.SHAPES, name, SMALL)
        path = tmp_path / "packed.gguf"
        synthetic.write(name, path)
    else:
        path = checkpoint(tmp_path, name)
    tokens, logits, outputs = ids(20, 1), [], []
    for chunk in (24, 5):  # in passes of 8, 8 and 4 rows; and of 5
        device = Device(path, kind=SteadyProgram, chunk=chunk)
        request = device.request(tokens, max_tokens=2)
        device.run(ahead=False)
        assert "pipelined" in device.modes
        outputs.append(request.sequences[0].output_ids)
        # What decoding left is the second token's logits.
        logits.append(device.program.logits[0, :VOCABULARY].float().cpu())
        model = device.model
    assert outputs[0] == outputs[1]
    assert same(logits[1], logits[0], 2e-3)
    expected = plain_logits(model, [*tokens, outputs[0][0]])[:VOCABULARY]
    assert (logits[0] - expected).norm() / expected.norm() < 0.03


# The whole engine.


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / f"{SHAPE}.gguf"
    synthetic.write(SHAPE, path)
    return path


@pytest.fixture(scope="module")
def mixed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with matrices in many formats, float ones among them, within a layer."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    kinds = {
        **{"token_embd": "F16", "output": "F16", "blk.0.attn_q": "F16", "blk.0.attn_k": "F16"},
        **{"blk.0.attn_v": "Q8_0", "blk.0.attn_output": "BF16", "blk.0.ffn_gate": "Q4_0"},
        **{"blk.0.ffn_up": "Q5_1", "blk.0.ffn_down": "F32", "blk.1.attn_output": "Q8_0"},
        **{"blk.1.ffn_gate": "F16", "blk.1.ffn_up": "F16", "blk.1.ffn_down": "Q4_1"},
    }

    def kind(tensor: Any, head_q8_0: bool) -> Any:
        wanted = kinds.get(tensor.name.removesuffix(".weight"))
        return gguf.GGMLQuantizationType[wanted] if wanted else tensor.tensor_type

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantise_q4_0, "new_type", kind)
        formats = quantise_q4_0.write_q4_0(packed, path)
    assert {"F16", "BF16", "F32", "Q4_K", "Q5_1", "Q8_0"} <= set(formats)
    return path


@asynccontextmanager
async def loaded(path: Path, **more: Any) -> AsyncIterator[AsyncEngine]:
    options: dict[str, Any] = {
        **{"device": "cuda", "deterministic": True, "max_seqs": 32, "context_length": 1024},
        **{"block_tokens": BLOCK_TOKENS, "chunk": 256},
    }
    async with AsyncEngine.load(path, **(options | more)) as engine:
        assert engine.info.deterministic is True
        yield engine


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 500))


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, synthetic.SHAPES[SHAPE].vocabulary), k=length)


async def answers(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], **more: Any
) -> list[Completion]:
    """Of prompts that are all there at once."""
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "prefix_cache": False}
    generations = [engine.generate(each, **(options | more)) for each in prompts]
    return await asyncio.gather(*(generation.result() for generation in generations))


async def one_by_one(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], **more: Any
) -> list[Completion]:
    return [done for each in prompts for done in await answers(engine, [each], **more)]


def said(completions: Sequence[Completion]) -> list[Any]:
    """Tokens, and log-probabilities to the bit."""
    assert all(len(done.token_ids) == TOKENS for done in completions)
    return [(done.token_ids, done.logprobs, done.prompt_logprobs) for done in completions]


SCORED = {"logprobs": 2, "prompt_logprobs": 1}
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 11}


@needs_gpu
@pytest.mark.timeout(520)
@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("packed", "auto"), ("packed", "int8"), ("mixed", "auto")]
)
def test_alone_and_in_batches_tokens_are_the_same(
    name: str, kv_dtype: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    prompts = [prompt(seed, 3 + 11 * seed % 97) for seed in range(32)]

    async def test() -> None:
        async with loaded(path, kv_dtype=kv_dtype) as engine:
            alone = said(await one_by_one(engine, prompts))
            sampled = said(await one_by_one(engine, prompts[:8], **SAMPLED))
            assert len({tokens for tokens, *_ in alone}) > 16  # or it would say little
            for size in (2, 3, 5, 8, 32):
                before, found = engine.stats().steps, []
                for start in range(0, len(prompts), size):
                    found += said(await answers(engine, prompts[start : start + size]))
                assert found == alone, size
                # They were batches.
                assert engine.stats().steps - before < (len(prompts) / size + 2) * TOKENS * 1.5
            assert said(await answers(engine, prompts[:8], **SAMPLED)) == sampled
            # What the host chooses, and scores: in plain steps, beside what the device chooses.
            scored = said(await one_by_one(engine, prompts[:8], **SCORED))
            assert [tokens for tokens, *_ in scored] == [tokens for tokens, *_ in alone[:8]]
            assert said(await answers(engine, prompts[:8], **SCORED)) == scored
            some, others = await asyncio.gather(
                answers(engine, prompts[:5], **SCORED), answers(engine, prompts[8:20])
            )
            assert said(some) == scored[:5]
            assert said(others) == alone[8:20]

    run(test())


@needs_gpu
@pytest.mark.timeout(520)
@pytest.mark.parametrize("name", ["packed", "mixed"])
def test_chunks_and_prefix_hits_do_not_change_tokens(
    name: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    prompts = [prompt(seed, length) for seed, length in enumerate((17, 300, 500, 130, 777))]

    async def test() -> None:
        expected: list[Any] = []
        for chunk in (16, 100, 512):
            async with loaded(path, chunk=chunk) as engine:
                alone = said(await one_by_one(engine, prompts, **SCORED))
                expected = expected or alone
                assert alone == expected, chunk
                assert said(await answers(engine, prompts, **SCORED)) == expected, chunk
                # Chosen on the device; prompts' chunks beside sequences that decode.
                tokens = [done.token_ids for done in await answers(engine, prompts)]
                assert tokens == [each for each, *_ in expected]
                for cached in (False, True):
                    done = await answers(engine, prompts, prefix_cache=True)
                    assert [each.token_ids for each in done] == tokens
                    hits = [each.usage.cached_tokens for each in done]
                    assert hits == [
                        (len(each) - 1) // BLOCK_TOKENS * BLOCK_TOKENS if cached else 0
                        for each in prompts
                    ]

    run(test())


@needs_gpu
@pytest.mark.timeout(520)
@pytest.mark.parametrize("name", ["packed", "mixed"])
def test_preempted_and_restored_tokens_are_the_same(
    name: str, request: pytest.FixtureRequest
) -> None:
    path, shape = request.getfixturevalue(name), synthetic.SHAPES[SHAPE]
    prompts = [prompt(seed, length) for seed, length in enumerate((40, 9, 60, 25, 33))]
    block_bytes = shape.layers * 2 * BLOCK_TOKENS * shape.kv_heads * shape.head_dim * 2

    async def test() -> None:
        async with loaded(path, context_length=256) as engine:
            expected = said(await one_by_one(engine, prompts))
            scored = said(await one_by_one(engine, prompts, logprobs=2))
            assert engine.stats().preempted == 0
        async with loaded(path, context_length=256, kv_bytes=24 * block_bytes) as engine:
            assert said(await answers(engine, prompts)) == expected
            assert engine.stats().resumed > 0
            resumed = engine.stats().resumed
            assert said(await answers(engine, prompts, logprobs=2)) == scored
            assert engine.stats().resumed > resumed

    run(test())
