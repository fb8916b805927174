"""Kernels of the GPU backend compute what the plain ones do.

On the device where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import reference
from asyncllm.kernels.reference import AttentionScratch, KeySpan
from asyncllm.kv.staging import _TorchMover
from asyncllm.model.rope import RopeConfig, cos_sin, inverse_frequencies
from asyncllm.options import SamplingParams
from asyncllm.sampling import philox
from asyncllm.sampling.filters import Filter, choose
from asyncllm.sampling.penalties import Penalties

# Triton looks at it when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
pytest.importorskip("triton", reason="the GPU backend's kernels need triton")

from asyncllm.kernels.cuda import attention, blocks, choice, rows  # noqa: E402

# numpy, under the interpreter, warns of what a GPU does not mind: infinities, lanes nobody uses.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN = math.nan


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def quantised_rows(count: int, width: int) -> rows.Quantised:
    return (
        torch.full((count, 2, width // 8), -1, dtype=torch.int32, device=DEVICE),
        poisoned(count, width // 32),
        torch.full((count, width // 32), -1, dtype=torch.int32, device=DEVICE),
    )


def dequantised(quantised: rows.Quantised) -> Tensor:
    """The values, after a look at the sums."""
    xq, xd, xs = (each.cpu() for each in quantised)
    count = len(xq)
    halves = xq.view(torch.int8).view(count, 2, -1, 16).transpose(1, 2)  # [rows, blocks, 2, 16]
    sums = xs.view(torch.int16).view(count, -1, 2)
    finite = xd.isfinite()[..., None]
    assert torch.equal(torch.where(finite, halves.sum(-1), 0), torch.where(finite, sums.int(), 0))
    return (halves.float() * xd[..., None, None]).reshape(count, -1)


def assert_quantised(quantised: rows.Quantised, wanted: Tensor) -> None:
    """Every value lies within half a step (and a little) of what it stands for."""
    got, wanted = dequantised(quantised), wanted.cpu().float()
    blocks = wanted.view(len(wanted), -1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    error = (got.view(blocks.shape) - blocks).abs()
    assert (error <= 0.51 * step + 1e-6).all()


# ---- rows


def test_quantised_rows_hold_values_to_half_a_step_with_the_sums_of_sixteens() -> None:
    x = randn(3, 96)
    x[1, :32] = 0.0
    x[2, 64:] *= 1e-30
    out = quantised_rows(3, 96)
    rows.quantise(x, out, blocks=2)
    assert_quantised(out, x)
    assert out[1][1, 0] == 0


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_run_with_no_number_gets_the_scale_nan_and_no_other_does(value: float) -> None:
    x = randn(2, 64)
    x[1, 40] = value
    out = quantised_rows(2, 64)
    rows.quantise(x, out)
    assert out[1].isnan().tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize(("width", "parts"), [(64, 1), (576, 1), (576, 4), (640, 3)])
def test_a_norm_after_a_normed_addition_is_the_plain_one_in_every_form(
    width: int, parts: int
) -> None:
    x, added = randn(3, width), randn(3, width, scale=3.0)
    weight, post = randn(width), randn(width)
    normed, total, wanted = (torch.empty_like(x) for _ in range(3))
    reference.rms_norm(added, post, 1e-5, normed)
    torch.add(x, normed, out=total)
    reference.rms_norm(total, weight, 1e-5, wanted)

    quantised, half, out = quantised_rows(3, width), poisoned(3, width).half(), poisoned(3, width)
    into = poisoned(3, width) if parts > 1 else None
    rows.norm(
        x, weight, 1e-5, quantised=quantised, half=half, out=out,
        added=added, post_weight=post, into=into, parts=parts,
    )  # fmt: skip
    torch.testing.assert_close(x if into is None else into, total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(half.float(), wanted, rtol=1e-3, atol=1e-3)
    assert_quantised(quantised, wanted)


def test_without_a_weight_the_sum_itself_is_written() -> None:
    x, added = randn(2, 40), randn(2, 40)
    wanted, out = x + added, poisoned(2, 40)
    rows.norm(x, None, 1e-5, added=added, out=out)
    assert torch.equal(out, wanted)
    assert torch.equal(x, wanted)


def test_a_norm_alone_leaves_its_input_as_it_is() -> None:
    x, weight = randn(2, 96), randn(96)
    before, wanted, out = x.clone(), torch.empty_like(x), poisoned(2, 96)
    rows.norm(x, weight, 1e-6, out=out)
    reference.rms_norm(before, weight, 1e-6, wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


def test_parts_refuse_to_change_the_row_that_they_read() -> None:
    x = randn(1, 64)
    with pytest.raises(ValueError, match="buffer of its own"):
        rows.norm(x, randn(64), 1e-5, added=randn(1, 64), parts=2)


def test_int8_rows_of_other_widths_than_multiples_of_32_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        rows.norm(randn(1, 48), randn(48), 1e-5, quantised=quantised_rows(1, 64))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_is_the_plain_one_in_every_form(activation: str) -> None:
    gate_up = randn(3, 2 * 288, scale=4.0)
    gate_up[0, 0], gate_up[0, 1] = 80.0, -120.0
    wanted = gate_up[:, :288].clone()
    reference.gated(wanted, gate_up[:, 288:], activation)
    quantised, half, out = quantised_rows(3, 288), poisoned(3, 288).half(), poisoned(3, 288)
    rows.gate(gate_up, activation, quantised=quantised, half=half, out=out, blocks=4)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(half.float(), wanted, rtol=1e-3, atol=1e-3)
    assert_quantised(quantised, wanted)


# ---- K, V and attention


@dataclass(frozen=True)
class Pool:
    """Sequences' K and V of one layer; whatever no query may read is NaN."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    rings: Tensor | None
    scales: rows.KvScales | None = None

    def numbers(self) -> list[Tensor]:
        """K and V as float32 on the CPU."""
        parts = [part.cpu().float() for part in (self.keys, self.values)]
        if self.scales is None:
            return parts
        each = zip(parts, self.scales, strict=True)
        return [part * scale.cpu().transpose(1, 2)[..., None] for part, scale in each]

    def blocks(self, slot: int, first: int, last: int) -> Tensor:
        """Numbers of the blocks with positions `first` to `last`, on the CPU."""
        size = self.keys.shape[1]
        ring = 0 if self.rings is None else int(self.rings[slot])
        numbers = torch.arange(first // size, last // size + 1)
        return self.tables[slot].cpu().long()[numbers % ring if ring else numbers]


def make_pool(
    seqs: int, context: int, block_tokens: int, kv_heads: int, head_dim: int,
    dtype: torch.dtype, ring: int = 0,
) -> Pool:  # fmt: skip
    """Empty, its blocks dealt out at random; every second sequence has no ring."""
    each = ring or -(-context // block_tokens)
    most = -(-context // block_tokens)
    order = torch.randperm(seqs * most).int()
    tables = torch.full((seqs, most + 1), 1 << 30, dtype=torch.int32)
    rings = torch.zeros(seqs, dtype=torch.int32)
    for seq in range(seqs):
        used = most if ring and seq % 2 else each
        tables[seq, :used] = order[seq * most : seq * most + used]
        rings[seq] = 0 if ring and seq % 2 else ring
    shape = (seqs * most, block_tokens, kv_heads, head_dim)
    scales = None
    if dtype == torch.int8:  # with another layer's in between
        many = poisoned(seqs * most, 3, kv_heads, block_tokens)
        scales = many[:, 0], many[:, 2]
        keys, values = (torch.full(shape, 77, dtype=dtype, device=DEVICE) for _ in range(2))
    else:
        keys, values = poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype)
    return Pool(keys, values, tables.to(DEVICE), rings.to(DEVICE) if ring else None, scales)


def fill(pool: Pool, slot: int, first: int, last: int) -> None:
    """Random K and V at positions `first` to `last`."""
    size = pool.keys.shape[1]
    for position in range(first, last + 1):
        block = int(pool.blocks(slot, position, position))
        for number, part in enumerate((pool.keys, pool.values)):
            new = randn(*part.shape[2:])
            if pool.scales is not None:
                scale = new.abs().amax(-1) / 127
                pool.scales[number][block, :, position % size] = scale
                new = (new / scale[:, None]).round()
            part[block, position % size] = new.to(part.dtype)


def plain_attention(
    q: Tensor, pool: Pool, slot: int, offset: int, window: int | None, cap: float
) -> Tensor:
    """`reference.attention` of consecutive queries [n, heads, head_dim], on the CPU."""
    count, heads, head_dim = q.shape
    size, kv_heads = pool.keys.shape[1:3]
    last = offset + count - 1
    first = 0 if window is None else max(0, offset - window + 1)
    first -= first % size
    keys = last + 1 - first
    padded = -(-keys // size) * size + 16
    shape = (padded, kv_heads, head_dim)
    lines = reference.padded_rows(count * heads)
    widened = torch.zeros(shape), torch.zeros(shape)
    scratch = AttentionScratch(
        keys=widened[0],
        values=widened[1],
        widened_keys=widened[0],
        widened_values=widened[1],
        queries=torch.zeros(4 * lines * head_dim),
        scores=torch.zeros(4 * lines * padded),
        hidden=torch.zeros(4 * lines * padded, dtype=torch.bool),
        result=torch.zeros(4 * lines * head_dim),
        positions=torch.arange(padded),
    )
    span = KeySpan(0, count, offset, window, first, keys, pool.blocks(slot, first, last))
    out = torch.empty(q.shape)
    # Positions before the window are NaN, and 0 * NaN in the plain one's sum is not what is asked.
    key_pool, value_pool = (each.nan_to_num() for each in pool.numbers())
    reference.attention(q.cpu().float(), key_pool, value_pool, span, 1.0, cap, scratch, out)
    return out


def assert_attended(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Close, as far as weights rounded to the queries' type allow."""
    error = 4e-3 if dtype == torch.float16 else 3e-2
    torch.testing.assert_close(got.cpu(), wanted, rtol=0.0, atol=error)


SHAPES = [  # head_dim, heads, kv_heads, block_tokens
    pytest.param(64, 3, 3, 16, id="64-alone"),
    pytest.param(80, 6, 2, 32, id="80-by-3"),
    pytest.param(96, 4, 1, 16, id="96-by-4"),
    pytest.param(128, 16, 2, 32, id="128-by-8"),
    pytest.param(256, 4, 1, 16, id="256-by-4"),
]


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "block_tokens"), SHAPES)
@pytest.mark.parametrize(
    ("dtype", "window", "cap"),
    [(torch.float16, None, 0.0), (torch.bfloat16, 40, 20.0)],
    ids=["whole", "windowed-capped"],
)
def test_decoding_rows_of_different_lengths_attend_as_the_plain_kernel(
    head_dim: int, heads: int, kv_heads: int, block_tokens: int,
    dtype: torch.dtype, window: int | None, cap: float,
) -> None:  # fmt: skip
    ring = -(-40 // block_tokens) + 1 if window else 0
    pool = make_pool(3, 288, block_tokens, kv_heads, head_dim, dtype, ring)
    slots, positions = [2, -1, 0, 1], [130, 9, 0, 287]
    for slot, position in zip(slots, positions, strict=True):
        if slot >= 0:
            fill(pool, slot, 0 if window is None else max(0, position - 39), position)
    q = randn(4, heads, head_dim, scale=0.2).to(dtype)
    scratch = attention.DecodeScratch.of(4, heads, kv_heads, head_dim, 3, DEVICE)
    scratch.partial.fill_(NAN)
    scratch.peaks.fill_(NAN)
    out, half = poisoned(4, heads, head_dim), poisoned(4, heads * head_dim, dtype=dtype)
    quantised = quantised_rows(4, heads * head_dim) if head_dim % 32 == 0 else None
    for _ in range(2):  # the second time on what the first has left
        attention.decode(
            q, pool.keys, pool.values, pool.tables, pool.rings, int32(slots), int32(positions),
            scratch, window=window, cap=cap, out=out, half=half, quantised=quantised,
        )  # fmt: skip
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot < 0:
            assert not out[row].any()
            continue
        wanted = plain_attention(q[row : row + 1], pool, slot, position, window, cap)
        assert_attended(out[row], wanted[0], dtype)
    torch.testing.assert_close(half.float(), out.view(4, -1), rtol=1e-2, atol=1e-3)
    if quantised is not None:
        assert_quantised(quantised, out.view(4, -1))


def test_a_decoding_row_does_not_depend_on_its_company() -> None:
    pool = make_pool(2, 160, 16, 2, 64, torch.float16)
    fill(pool, 0, 0, 150)
    fill(pool, 1, 0, 20)
    q = randn(2, 4, 64).half()
    results = []
    for some in ([0], [1, 0]):
        out = poisoned(len(some), 4, 64)
        attention.decode(
            q[some], pool.keys, pool.values, pool.tables, None,
            int32(some), int32([[150, 20][slot] for slot in some]),
            attention.DecodeScratch.of(len(some), 4, 2, 64, 2, DEVICE), out=out,
        )  # fmt: skip
        results.append(out[-1])
    assert torch.equal(*results)


def test_splits_fill_the_device_but_do_not_outnumber_the_tiles() -> None:
    assert attention.decode_splits(1, 8, 4096) == 32
    assert attention.decode_splits(1, 8, 128) == 2
    assert attention.decode_splits(64, 8, 4096) == 1


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "block_tokens"), SHAPES[1:4])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "window", "cap"),
    [(torch.float16, None, 0.0), (torch.bfloat16, 40, 20.0)],
    ids=["whole", "windowed-capped"],
)
def test_decoding_rows_attend_to_int8_as_to_the_numbers_it_stands_for(
    head_dim: int, heads: int, kv_heads: int, block_tokens: int,
    splits: int, dtype: torch.dtype, window: int | None, cap: float,
) -> None:  # fmt: skip
    ring = -(-40 // block_tokens) + 1 if window else 0
    pool = make_pool(2, 288, block_tokens, kv_heads, head_dim, torch.int8, ring)
    slots, positions = [1, -1, 0], [287, 9, 64]
    for slot, position in zip(slots, positions, strict=True):
        if slot >= 0:
            fill(pool, slot, 0 if window is None else max(0, position - 39), position)
    q, out = randn(3, heads, head_dim, scale=0.2).to(dtype), poisoned(3, heads, head_dim)
    attention.decode(
        q, pool.keys, pool.values, pool.tables, pool.rings, int32(slots), int32(positions),
        attention.DecodeScratch.of(3, heads, kv_heads, head_dim, splits, DEVICE),
        window=window, cap=cap, out=out, scales=pool.scales,
    )  # fmt: skip
    for row in (0, 2):
        wanted = plain_attention(q[row : row + 1], pool, slots[row], positions[row], window, cap)
        assert_attended(out[row], wanted[0], dtype)
    assert not out[1].any()


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "block_tokens"), SHAPES)
@pytest.mark.parametrize(
    ("dtype", "window", "cap"),
    [(torch.float16, None, 20.0), (torch.bfloat16, 24, 0.0), (torch.float16, 90, 0.0)],
    ids=["whole-capped", "windowed", "widely-windowed"],
)
def test_chunks_of_prompts_attend_as_the_plain_kernel(
    head_dim: int, heads: int, kv_heads: int, block_tokens: int,
    dtype: torch.dtype, window: int | None, cap: float,
) -> None:  # fmt: skip
    chunks = [(1, 37, 0, 1), (40, 21, 130, 0), (0, 0, 0, 0), (39, 1, 70, 2)]  # the rest unused
    ring = -(-(window - 1 + 40) // block_tokens) + 1 if window else 0
    pool = make_pool(3, 224, block_tokens, kv_heads, head_dim, dtype, ring)
    for _, count, offset, slot in chunks:
        if count:
            first = 0 if window is None else max(0, offset - window + 1)
            fill(pool, slot, first, offset + count - 1)
    q = randn(64, heads, head_dim, scale=0.2).to(dtype)
    out, half = poisoned(64, heads, head_dim), poisoned(64, heads * head_dim, dtype=dtype)
    quantised = quantised_rows(64, heads * head_dim) if head_dim % 32 == 0 else None
    attention.prefill(
        q, pool.keys, pool.values, pool.tables, pool.rings, int32(chunks), 40,
        window=window, cap=cap, out=out, half=half, quantised=quantised, tile=32,
    )  # fmt: skip
    written = torch.zeros(64, dtype=torch.bool)
    for first, count, offset, slot in chunks:
        own = slice(first, first + count)
        written[own] = True
        if count:
            wanted = plain_attention(q[own], pool, slot, offset, window, cap)
            assert_attended(out[own], wanted, dtype)
    assert out[~written].isnan().all()
    flat = out.view(64, -1)
    torch.testing.assert_close(half[written].float(), flat[written], rtol=1e-2, atol=1e-3)
    if quantised is not None:
        some = tuple(each[written].contiguous() for each in quantised)
        assert_quantised((some[0], some[1], some[2]), flat[written])


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "block_tokens"), SHAPES[1:4])
@pytest.mark.parametrize("window", [None, 50])
def test_chunks_of_prompts_attend_to_int8_as_to_the_numbers_it_stands_for(
    head_dim: int, heads: int, kv_heads: int, block_tokens: int, window: int | None
) -> None:
    chunks = [(0, 37, 0, 1), (37, 3, 130, 0)]
    ring = -(-(window - 1 + 40) // block_tokens) + 1 if window else 0
    pool = make_pool(2, 192, block_tokens, kv_heads, head_dim, torch.int8, ring)
    for _, count, offset, slot in chunks:
        fill(pool, slot, 0 if window is None else max(0, offset - window + 1), offset + count - 1)
    q, out = randn(40, heads, head_dim, scale=0.2).half(), poisoned(40, heads, head_dim)
    attention.prefill(
        q, pool.keys, pool.values, pool.tables, pool.rings, int32(chunks), 40,
        window=window, out=out, scales=pool.scales, tile=32,
    )  # fmt: skip
    for first, count, offset, slot in chunks:
        own = slice(first, first + count)
        wanted = plain_attention(q[own], pool, slot, offset, window, 0.0)
        assert_attended(out[own], wanted, torch.float16)


@pytest.mark.parametrize("size", [1e-3, 1.0, 5e4])
def test_values_of_any_size_that_float16_has_are_as_exact_in_int8(size: float) -> None:
    pool = make_pool(1, 176, 16, 2, 64, torch.int8)
    fill(pool, 0, 0, 170)
    assert pool.scales is not None
    pool.scales[1].mul_(size / 4)
    q = randn(1, 4, 64, scale=0.5).half()
    out = poisoned(1, 4, 64)
    attention.decode(
        q, pool.keys, pool.values, pool.tables, None, int32([0]), int32([170]),
        attention.DecodeScratch.of(1, 4, 2, 64, 2, DEVICE), out=out, scales=pool.scales,
    )  # fmt: skip
    wanted = plain_attention(q, pool, 0, 170, None, 0.0)
    error = ((out.cpu() - wanted).norm() / wanted.norm()).item()
    assert error < 2e-3, error


def test_int8_needs_scales_and_nothing_else_takes_them() -> None:
    for dtype, other in ((torch.int8, torch.float16), (torch.float16, torch.int8)):
        pool = make_pool(1, 16, 16, 1, 64, dtype)
        wrong = make_pool(1, 16, 16, 1, 64, other).scales
        with pytest.raises(ValueError, match=f"{dtype} with"):
            attention.decode(
                randn(1, 2, 64).half(), pool.keys, pool.values, pool.tables, None, int32([0]),
                int32([0]), attention.DecodeScratch.of(1, 2, 1, 64, 1, DEVICE), scales=wrong,
            )  # fmt: skip


@pytest.mark.parametrize("window", [None, 50])
def test_the_cuts_of_a_prompt_do_not_change_its_rows(window: int | None) -> None:
    pool = make_pool(1, 96, 16, 1, 64, torch.float16)
    fill(pool, 0, 0, 89)
    q = randn(90, 2, 64, scale=0.2).half()
    results = []
    for chunks in ([[0, 90, 0, 0]], [[0, 31, 0, 0], [31, 59, 31, 0]]):
        out = poisoned(90, 2, 64)
        attention.prefill(
            q, pool.keys, pool.values, pool.tables, None, int32(chunks), 90,
            window=window, out=out, tile=32, lines=64,
        )  # fmt: skip
        results.append(out)
    if DEVICE == "cuda":
        assert torch.equal(*results)
    else:  # numpy's products depend on where in a matrix a row is
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_float32_pool_serves_half_queries() -> None:
    pool = make_pool(1, 48, 16, 1, 64, torch.float32)
    fill(pool, 0, 0, 40)
    q, out = randn(2, 2, 64, scale=0.2).half(), poisoned(2, 2, 64)
    attention.prefill(
        q, pool.keys, pool.values, pool.tables, None, int32([[0, 2, 39, 0]]), 2, out=out
    )
    wanted = plain_attention(q, pool, 0, 39, None, 0.0)
    assert_attended(out, wanted, torch.float16)


def test_int8_rows_of_heads_that_runs_would_cross_are_refused() -> None:
    pool = make_pool(1, 16, 16, 1, 80, torch.float16)
    with pytest.raises(ValueError, match="runs of 32 would cross"):
        attention.decode(
            randn(1, 2, 80).half(), pool.keys, pool.values, pool.tables, None,
            int32([0]), int32([0]), attention.DecodeScratch.of(1, 2, 1, 80, 1, DEVICE),
            quantised=quantised_rows(1, 160),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "heads", "kv_heads", "tile"),
    [(64, 64, 3, 1, 1), (80, 32, 4, 2, 2), (96, 96, 4, 4, 4), (256, 128, 2, 1, None)],
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
def test_heads_are_normed_rotated_and_written_where_the_table_says(
    head_dim: int, rotary_dim: int, heads: int, kv_heads: int, tile: int | None,
    interleaved: bool, normed: bool,
) -> None:  # fmt: skip
    pool = make_pool(3, 96, 16, kv_heads, head_dim, torch.float16, ring=3)
    slots, positions = int32([1, -1, 2, 0]), int32([33, 1 << 29, 95, 50])
    frequencies, factor = inverse_frequencies(RopeConfig(rotary_dim=rotary_dim, base=10000.0))
    cos, sin = (t.to(DEVICE) for t in cos_sin(frequencies, factor, torch.arange(96)))
    width = (heads + 2 * kv_heads) * head_dim
    qkv, bias = randn(4, width), randn(width) if normed else None
    q_norm, k_norm = (randn(head_dim), randn(head_dim)) if normed else (None, None)
    q_out = poisoned(4, heads, head_dim, dtype=torch.bfloat16)
    rows.heads(
        qkv, q_out, pool.keys, pool.values, pool.tables, pool.rings, slots, positions, cos, sin,
        scale=0.3, interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=1e-6, bias=bias,
        tile=tile,
    )  # fmt: skip

    whole = qkv if bias is None else qkv + bias
    lines = whole.view(4, -1, head_dim)
    q, k, v = lines[:, :heads].clone(), lines[:, heads:-kv_heads].clone(), lines[:, -kv_heads:]
    if q_norm is not None and k_norm is not None:
        reference.rms_norm(q.clone(), q_norm, 1e-6, q)
        reference.rms_norm(k.clone(), k_norm, 1e-6, k)
    real = [0, 2, 3]
    at = positions[real].long()
    for part in (q, k):
        some = part[real]
        scratch = torch.empty(some.numel(), device=DEVICE)
        reference.rope(some, cos[at], sin[at], interleaved, scratch)
        part[real] = some
    torch.testing.assert_close(q_out[real].float(), q[real] * 0.3, rtol=1e-2, atol=1e-3)
    written = torch.zeros(pool.keys.shape[:2], dtype=torch.bool)
    for row in real:
        slot, position = int(slots[row]), int(positions[row])
        block = int(pool.blocks(slot, position, position))
        written[block, position % 16] = True
        for part, target in ((k, pool.keys), (v, pool.values)):
            got = target[block, position % 16].float()
            torch.testing.assert_close(got, part[row], rtol=2e-3, atol=2e-3)
    assert pool.keys[~written].isnan().all()
    assert pool.values[~written].isnan().all()


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "tile"), [(64, 3, 1, 1), (80, 4, 2, 2)])
def test_int8_heads_are_within_half_a_step_and_what_has_no_number_says_so(
    head_dim: int, heads: int, kv_heads: int, tile: int
) -> None:
    whole = make_pool(2, 96, 16, kv_heads, head_dim, torch.float32)
    small = make_pool(2, 96, 16, kv_heads, head_dim, torch.int8)
    small.tables.copy_(whole.tables)
    slots, positions = int32([1, -1, 0, 0]), int32([33, 1 << 29, 95, 50])
    cos, sin = torch.rand(96, 16).to(DEVICE), torch.rand(96, 16).to(DEVICE)
    qkv = randn(4, (heads + 2 * kv_heads) * head_dim, scale=3.0)
    qkv[2, -head_dim:] = 0.0
    qkv[3, -1] = math.inf
    for pool in (whole, small):
        q_out = poisoned(4, heads, head_dim, dtype=torch.float16)
        rows.heads(
            qkv, q_out, pool.keys, pool.values, pool.tables, None, slots, positions, cos, sin,
            scale=0.3, interleaved=False, scales=pool.scales, tile=tile,
        )  # fmt: skip
        assert q_out[[0, 2, 3]].isfinite().all()
    assert small.scales is not None
    got, wanted = torch.stack(small.numbers()), torch.stack(whole.numbers())
    broken = wanted.isinf().any(-1)
    assert broken.sum() == 1
    assert got[broken].isnan().all()
    # Nothing else is written, and of each vector that is the scale too.
    assert torch.equal(got.isnan().all(-1), wanted.isnan().all(-1) | broken)
    there = ~got.isnan().any(-1)
    assert there.sum() == 2 * 3 * kv_heads - 1
    got, wanted = got[there], wanted[there]
    step = wanted.abs().amax(-1, keepdim=True) / 127
    assert ((got - wanted).abs() <= 0.501 * step).all()
    assert ((got - wanted).abs() > 0.3 * step).any()
    untouched = torch.stack([part.cpu() for part in (small.keys, small.values)])
    assert (untouched[~there & ~broken] == 77).all()


def test_attention_over_int8_errs_by_no_more_than_its_steps() -> None:
    """From the product of q, k and v to the result, beside float32 K and V."""
    length, heads, kv_heads, width = 70, 4, 2, 64
    whole = make_pool(1, 80, 16, kv_heads, width, torch.float32)
    small = make_pool(1, 80, 16, kv_heads, width, torch.int8)
    slots, positions = int32([0] * length), int32(range(length))
    cos, sin = torch.ones(80, 32).to(DEVICE), torch.zeros(80, 32).to(DEVICE)
    qkv = randn(length, (heads + 2 * kv_heads) * width)
    results, queries = [], poisoned(length, heads, width, dtype=torch.float16)
    for pool in (whole, small):
        rows.heads(
            qkv, queries, pool.keys, pool.values, pool.tables, None, slots, positions, cos, sin,
            scale=0.02, interleaved=False, scales=pool.scales,
        )  # fmt: skip
        out = poisoned(length, heads, width)
        attention.prefill(
            queries, pool.keys, pool.values, pool.tables, None, int32([[0, length, 0, 0]]), length,
            out=out, scales=pool.scales,
        )  # fmt: skip
        results.append(out.cpu())
    assert small.scales is not None
    steps = [scale[~scale.isnan()].max().item() for scale in small.scales]
    # A score is off by half a step of each element of K at most, a weight by the exponential of
    # twice that, a value by half a step of V.
    score = queries.float().abs().sum(-1).max().item() * steps[0] / 2
    largest = 127 * steps[1]
    bound = steps[1] / 2 + (math.exp(2 * score) - 1) * largest + 4e-3
    error = (results[0] - results[1]).abs().max().item()
    assert bound < largest / 4
    assert steps[1] / 20 < error < bound


# ---- choosing


def draws(filters: Sequence[Filter], seeds: Sequence[int], outputs: Sequence[int]) -> choice.Draws:
    def floats(name: str) -> Tensor:
        numbers = [min(getattr(f, name), 3e38) for f in filters]
        return torch.tensor(numbers, dtype=torch.float32, device=DEVICE)

    words = torch.tensor(seeds, dtype=torch.int64).view(torch.int32).view(-1, 2)
    return choice.Draws(
        temperature=floats("temperature"),
        top_k=int32([f.top_k for f in filters]),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        seeds=words.to(DEVICE),
        outputs=int32(list(outputs)),
        indices=int32([0] * len(filters)),
    )


def sampled(logits: Tensor, how: choice.Draws, parts: int = 2, cap: float = 0.0) -> list[int]:
    scratch = choice.ChoiceScratch.of(len(logits), logits.shape[1], DEVICE, parts)
    for each in (scratch.peaks, scratch.sums, scratch.states, scratch.shares):
        each.fill_(-(1 << 62))
    tokens = int32([-7] * len(logits))
    choice.sample(logits.clone(), how, tokens, scratch, cap=cap)
    return tokens.tolist()


def test_uniforms_have_the_bits_of_the_samplers() -> None:
    seeds = [0, 1, (1 << 63) - 1, 0x0123456789ABCDEF, -1]
    outputs, indices = [0, 7, 123456, (1 << 31) - 1, 1], [0, 1, 5, 2, 9]
    words = torch.tensor(seeds, dtype=torch.int64).view(torch.int32).view(-1, 2).to(DEVICE)
    out = poisoned(5, dtype=torch.float64)
    choice.uniforms(words, int32(outputs), int32(indices), out)
    wanted = philox.uniforms([seed % (1 << 64) for seed in seeds], outputs, indices)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("parts", [1, 5, 8])
def test_greedy_takes_the_first_of_the_largest_and_tells_what_is_none(parts: int) -> None:
    logits = randn(5, 1500)
    logits[0, [1203, 400, 1499]] = 9.0
    logits[1, 77] = NAN
    logits[2] = -math.inf
    logits[3, 1499] = math.inf
    logits[4] = -3.0
    logits[4, 9], logits[4, 700] = -0.0, 0.0
    scratch = choice.ChoiceScratch.of(5, 1500, DEVICE, parts)
    tokens = int32([-7] * 5)
    choice.greedy(logits, tokens, scratch)
    assert tokens.tolist() == [400, -1, -3, -2, 9]


def test_a_cap_applies_before_the_choice() -> None:
    logits = randn(2, 300, scale=4.0)
    wanted = logits.clone()
    reference.softcap(wanted, 5.0)
    scratch = choice.ChoiceScratch.of(2, 300, DEVICE, 2)
    choice.greedy(logits, int32([0, 0]), scratch, cap=5.0)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=2e-6)


FILTERS = [
    Filter(0.8, 600, math.inf, 0.0, math.inf),
    Filter(1.0, 40, math.inf, 0.0, math.inf),
    Filter(0.7, 600, 0.9, 0.0, math.inf),
    Filter(1.3, 50, 0.8, 0.0, math.inf),
    Filter(1.0, 600, math.inf, 0.05, math.inf),
    Filter(2.0, 400, 0.95, 0.001, math.inf),
    Filter(1.0, 1, 0.5, 0.0, math.inf),
]


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_sampling_chooses_as_the_sampler_does(scale: float) -> None:
    filters = FILTERS if scale == 0.5 else FILTERS[2:4]
    count = len(filters)
    logits = randn(count, 600, scale=scale)
    seeds, outputs = list(range(100, 100 + count)), list(range(count))
    numbers = [philox.uniform(s, o, 0) for s, o in zip(seeds, outputs, strict=True)]
    wanted = choose(logits.cpu(), filters, numbers)
    assert sampled(logits, draws(filters, seeds, outputs)) == wanted


def test_equal_logits_at_the_border_are_kept_by_id() -> None:
    filters = [  # of two tokens that stand out, and many alike
        Filter(1.0, 5, math.inf, 0.0, math.inf),
        Filter(1.0, 500, 0.31, 0.0, math.inf),
        Filter(1.0, 6, 0.7, 0.0, math.inf),
    ] * 2
    count = len(filters)
    logits = torch.zeros(count, 500, device=DEVICE)
    logits[:, [450, 3]] = 1.0
    seeds = list(range(count))
    numbers = [philox.uniform(s, 0, 0) for s in seeds]
    wanted = choose(logits.cpu(), filters, numbers)
    assert len(set(wanted)) > 2
    assert sampled(logits, draws(filters, seeds, [0] * count)) == wanted


def test_the_parts_of_a_row_and_its_company_do_not_change_the_choice() -> None:
    filters = [FILTERS[5], FILTERS[2], replace(FILTERS[3], temperature=0.0)]
    logits, seeds = randn(3, 600), [5, 6, 7]
    whole = sampled(logits, draws(filters, seeds, [1, 2, 3]), parts=3)
    assert sampled(logits, draws(filters, seeds, [1, 2, 3]), parts=1) == whole
    assert whole[2] == int(logits[2].argmax())
    alone = [
        sampled(logits[i : i + 1], draws(filters[i : i + 1], seeds[i : i + 1], [i + 1]), 1)[0]
        for i in range(3)
    ]
    assert alone == whole


def test_rows_without_numbers_to_draw_by_have_no_token() -> None:
    logits = randn(3, 300)
    logits[0, 17] = NAN
    logits[1] = -math.inf
    logits[2, 250] = math.inf
    how = draws([Filter(1.0, 40, 0.9, 0.0, math.inf)] * 3, [1, 2, 3], [0, 0, 0])
    assert sampled(logits, how) == [-1, -3, -2]
    assert math.isnan(choice.SICK[-1])
    assert (choice.SICK[-2], choice.SICK[-3]) == (math.inf, -math.inf)


@pytest.mark.parametrize("cap", [0.0, 10.0])
def test_edits_are_the_samplers_in_its_order(cap: float) -> None:
    vocabulary = 1200
    params = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25),
        SamplingParams(
            repetition_penalty=0.7, frequency_penalty=0.1, logit_bias={5: 4.0, 1100: -math.inf}
        ),
        SamplingParams(),
    ]
    prompt, output = [3, 9, 9, 1100], [9, 40, 40, 1199, 5]
    counts = torch.zeros(4, vocabulary, dtype=torch.int32, device=DEVICE)
    counts[:, prompt] = choice.IN_PROMPT
    slots = int32([2, 0, 1, 3, -1])
    for token in output:
        choice.count(int32([token] * 4 + [-1]), slots, counts)
    bias_ids = torch.full((4, 2), 7, dtype=torch.int32, device=DEVICE)
    biases = poisoned(4, 2)
    bias_ids[2], biases[2] = int32([5, 1100]), torch.tensor([4.0, -math.inf])
    numbers = {
        name: torch.tensor([getattr(p, name) for p in params], dtype=torch.float64, device=DEVICE)
        for name in ("presence_penalty", "frequency_penalty")
    }
    repetition = torch.tensor([1.3, 1.0, 0.7, 1.0], device=DEVICE)
    edits = choice.Edits(
        repetition, numbers["presence_penalty"], numbers["frequency_penalty"],
        counts, bias_ids, biases,
    )  # fmt: skip
    logits = randn(5, vocabulary, scale=3.0)
    wanted = logits.cpu()
    choice.edit(logits, edits, slots, int32([2, 0, 0, -1, 5]), cap=cap)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if cap:
            reference.softcap(wanted[row], cap)
        for token, bias in (params[slot].logit_bias or {}).items():
            wanted[row, token] += bias
        penalties = Penalties(params[slot], prompt, output, vocabulary, wanted.device)
        penalties.apply(wanted[row])
    if cap:
        torch.testing.assert_close(logits.cpu(), wanted, rtol=1e-5, atol=5e-6)
    else:
        assert torch.equal(logits.cpu(), wanted)


def test_a_count_ends_below_the_flag_of_the_prompt() -> None:
    counts = int32([[0x7FFF, choice.IN_PROMPT | 0x7FFE]])
    for token in (0, 1, 1):
        choice.count(int32([token]), int32([0]), counts)
    assert counts.tolist() == [[0x7FFF, choice.IN_PROMPT | 0x7FFF]]


# Blocks on their way to and from a store.


def test_blocks_are_moved_as_torch_moves_them() -> None:
    # K or V of two layers, and scales whose blocks do not lie side by side.
    buffers = [torch.randint(-99, 99, (9, 16, 2, 40), device=DEVICE).half() for _ in range(2)]
    scales = randn(9, 4, 2, 16)
    buffers += [scales[:, 1], scales[:, 3]]
    group, plain = blocks.pieces(buffers), _TorchMover(buffers, torch.int64)
    assert group.words == plain.words
    chosen = torch.tensor([7, 0, 3], device=DEVICE)
    packed, wanted = (torch.full((5, group.words + 3), -1, device=DEVICE) for _ in range(2))
    blocks.gather(group, chosen, packed)
    plain.gather(chosen, wanted[:, : group.words])
    assert torch.equal(packed, wanted)
    before = [buffer.clone() for buffer in buffers]
    blocks.scatter(group, torch.tensor([1, 8, 2], device=DEVICE), packed)
    for buffer, old in zip(buffers, before, strict=True):
        old[[1, 8, 2]] = old[[7, 0, 3]]
        assert torch.equal(buffer, old)


def test_blocks_of_no_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="6 bytes"):
        blocks.pieces([torch.zeros(3, 3, dtype=torch.float16, device=DEVICE)])
