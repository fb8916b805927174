"""The compiled kernels compute what the plain ones do, with the same bits in all their forms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from asyncllm.checkpoint.formats import Format
from asyncllm.kernels import reference
from asyncllm.kernels.cpu import layers, sampling
from asyncllm.kernels.cpu import step as s
from asyncllm.kernels.cpu.isa import Isa
from asyncllm.kernels.cpu.packing import pack, tile_form
from asyncllm.kernels.cpu.products import quantised_bytes
from asyncllm.kernels.cpu.tiles import FLOATS, LAYOUTS, TILE_ROWS, tile_bytes
from tests.cpu_kernels import (
    BEST,
    EVERYTHING,
    ISAS,
    Array,
    kernel,
    library,
    record,
    run,
    run_rows,
    zero_tiles,
)
from tests.gguf_bytes import BY_NAME, random_blocks

# Compiling is what takes time, so the fastest form gets every format and the others those in which
# they differ from it: by the products of bytes, by tables, and without float16 by the scales.
TYPICAL = {
    Isa.PORTABLE: ("Q4_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS", "F16"),
    Isa.AVX2: ("Q4_1", "Q8_0", "Q2_K", "IQ4_XS"),
    Isa.AVX2_VNNI: ("Q4_1", "Q8_0", "IQ4_XS"),
    Isa.AVX512_VNNI: ("Q4_1", "Q8_0", "Q6_K", "IQ4_XS"),
}


def cases(names: Iterable[str]) -> pytest.MarkDecorator:
    """Formats in the forms that this machine runs."""
    return pytest.mark.parametrize(
        ("name", "isa"),
        [
            pytest.param(name, isa, id=f"{name}-{isa.name}")
            for isa in ISAS
            for name in names
            if isa == BEST or EVERYTHING or name in TYPICAL[isa]
        ],
    )


CASES = cases(BY_NAME)
EVERY_ISA = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)

OUTPUTS, COLUMNS = 37, 512  # outputs are no multiple of 16
PADDED = -(-OUTPUTS // TILE_ROWS) * TILE_ROWS
COMPANY = 9


@dataclass(frozen=True)
class Weight:
    """A random weight in tiles."""

    form: str
    values: Array  # float32 [OUTPUTS, COLUMNS], as the format's own unpacking gives them
    tiles: Array


@cache
def weight(name: str) -> Weight:
    layout: Format = BY_NAME[name]
    raw = random_blocks(layout, OUTPUTS, COLUMNS, np.random.default_rng(3))
    values = torch.empty(OUTPUTS, COLUMNS)
    layout.unpack(torch.from_numpy(raw.copy()), values)
    form = tile_form(name)
    tiles = zero_tiles(OUTPUTS, COLUMNS, form)
    pack(library(), layout, raw, COLUMNS, tiles)
    return Weight(form, values.numpy(), tiles)


@cache
def activations(rows: int = COMPANY, columns: int = COLUMNS) -> Array:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def quantise(x: Array) -> Array:
    """The int8 form of rows, uint8 [rows, bytes]."""
    rows, columns = x.shape
    out = np.zeros((rows, quantised_bytes(columns)), np.uint8)
    parameters = record(
        s.QUANTISE,
        **{"x": x, "x_stride": x.strides[0], "columns": columns},
        **{"out": out, "out_stride": out.strides[0]},
    )
    run_rows(kernel("quantise", layers.quantise), parameters, rows)
    return out


def dequantised(quants: Array, columns: int) -> Array:
    """float64 [rows, columns]."""
    whole = quants[:, :columns].view(np.int8).astype(np.float64)
    scales = quants[:, columns : columns + columns // 8].copy().view(np.float32).astype(np.float64)
    return (whole.reshape(len(quants), -1, 32) * scales[..., None]).reshape(len(quants), columns)


def multiply(
    of: Weight, isa: Isa, x: Array, *, bias: Array | None = None, each: int = 2, row_block: int = 4
) -> Array:
    """`x @ weight.T` as the product kernel has it, float32 [rows, PADDED]."""
    source = x if of.form in FLOATS else quantise(x)
    out = np.full((len(x), PADDED + 16), 7.0, np.float32)
    parameters = record(
        s.PRODUCT,
        **{"tiles": of.tiles, "tile_bytes": of.tiles.shape[1], "count": len(of.tiles)},
        **{"x": source, "x_stride": source.strides[0], "columns": x.shape[1]},
        **{"out": out, "out_stride": out.strides[0]},
        **{"bias": 0 if bias is None else bias, "rows": s.ROWS},
    )
    function = kernel(f"product-{of.form}-{isa.name}", lambda: layers.product(isa, of.form))
    units = -(-len(of.tiles) // each) * -(-len(x) // row_block)
    run(function, parameters, rows=len(x), each=each, units=units, row_block=row_block)
    assert (out[:, PADDED:] == 7.0).all(), "written beyond the last tile"
    return out[:, :PADDED]


@cache
def product(name: str, isa: Isa) -> Array:
    return multiply(weight(name), isa, activations())


def unpacked(of: Weight, isa: Isa, tokens: Array, scale: float = 1.0) -> Array:
    out = np.zeros((len(tokens), COLUMNS), np.float32)
    parameters = record(
        s.EMBEDDING,
        **{"tiles": of.tiles, "tile_bytes": of.tiles.shape[1], "columns": COLUMNS},
        **{"tokens": tokens, "scale": scale, "out": out, "out_stride": out.strides[0]},
    )
    function = kernel(f"embedding-{of.form}-{isa.name}", lambda: layers.embedding(isa, of.form))
    run_rows(function, parameters, len(tokens), 5)
    return out


def same_bits(x: Array, y: Array) -> bool:
    return x.shape == y.shape and x.tobytes() == y.tobytes()


# Weights


@CASES
def test_tiles_unpack_to_the_bits_of_the_checkpoint(name: str, isa: Isa) -> None:
    of = weight(name)
    tokens = np.random.default_rng(0).permutation(OUTPUTS)
    found, expected = unpacked(of, isa, tokens), of.values[tokens]
    if of.form == "INT8":
        found, expected = found + 0.0, expected + 0.0  # integers have no zero that is negative
    assert same_bits(found, expected)
    assert same_bits(unpacked(of, isa, tokens, 3.0) + 0.0, found * np.float32(3.0) + 0.0)


@pytest.mark.parametrize("name", sorted({*LAYOUTS, *FLOATS} & set(BY_NAME)))
def test_any_bytes_at_all_become_tiles_that_unpack_to_the_same(name: str) -> None:
    layout = BY_NAME[name]
    raw = np.random.default_rng(6).integers(
        0, 256, (OUTPUTS, layout.row_bytes(COLUMNS)), dtype=np.uint8
    )
    expected = torch.empty(OUTPUTS, COLUMNS)
    layout.unpack(torch.from_numpy(raw.copy()), expected)
    tiles = zero_tiles(OUTPUTS, COLUMNS, name)
    pack(library(), layout, raw, COLUMNS, tiles)
    found = unpacked(Weight(name, expected.numpy(), tiles), BEST, np.arange(OUTPUTS))
    numbers = ~np.isnan(expected.numpy())
    assert (np.isnan(found) == ~numbers).all()
    assert same_bits(found[numbers], expected.numpy()[numbers])


@CASES
def test_products_are_those_of_float64(name: str, isa: Isa) -> None:
    of, x = weight(name), activations()
    values = of.values.astype(np.float64).T
    found = product(name, isa)[:, :OUTPUTS]
    exact = x.astype(np.float64) @ values
    seen = exact if of.form in FLOATS else dequantised(quantise(x), COLUMNS) @ values
    assert np.abs(found - seen).max() < 1e-5 * np.abs(seen).max()
    assert np.linalg.norm(found - exact) < 1.5e-2 * np.linalg.norm(exact)


@CASES
def test_products_have_the_same_bits_in_every_form(name: str, isa: Isa) -> None:
    assert same_bits(product(name, isa), product(name, BEST))


@CASES
def test_outputs_beyond_the_last_are_zero(name: str, isa: Isa) -> None:
    assert (product(name, isa)[:, OUTPUTS:] == 0).all()


@CASES
def test_a_row_of_a_product_has_the_same_bits_in_any_company(name: str, isa: Isa) -> None:
    of, x, expected = weight(name), activations(), product(name, isa)
    for rows in range(1, COMPANY + 1):
        for first in range(0, COMPANY - rows + 1, 3):
            found = multiply(of, isa, x[first : first + rows], each=3, row_block=64)
            assert same_bits(found, expected[first : first + rows])


@cases(["Q8_0", "F16"])
def test_a_bias_is_added_to_every_row(name: str, isa: Isa) -> None:
    bias = np.random.default_rng(2).standard_normal(PADDED).astype(np.float32)
    found = multiply(weight(name), isa, activations(), bias=bias)
    assert same_bits(found, product(name, isa) + bias)


def test_every_format_has_tiles_of_the_size_that_is_announced() -> None:
    for name in BY_NAME:
        of = weight(name)
        assert of.tiles.shape == (PADDED // TILE_ROWS, tile_bytes(of.form, COLUMNS))
        assert of.tiles.ctypes.data % 64 == 0


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_rare_format_s_weights_that_are_no_integers_times_a_scale_are_refused(
    scale: float,
) -> None:
    layout = BY_NAME["TQ2_0"]
    raw = random_blocks(layout, 16, 256, np.random.default_rng(0))
    raw[5, 64:66] = np.array([scale], np.float16).view(np.uint8)
    with (
        np.errstate(all="ignore"),
        pytest.raises(ValueError, match="TQ2_0: weights that are no integers times a scale"),
    ):
        pack(library(), layout, raw, 256, zero_tiles(16, 256, tile_form("TQ2_0")))


# Activations


def test_int8_activations_are_the_nearest_and_their_sums_are_right() -> None:
    x = activations() * np.float32(3)
    x[2, 64:96] = 0.0
    quants = quantise(x)
    chunks = COLUMNS // 32
    peaks = np.abs(x.reshape(COMPANY, chunks, 32)).max(-1)
    whole = quants[:, :COLUMNS].view(np.int8).astype(np.int64).reshape(COMPANY, chunks, 32)
    error = np.abs(dequantised(quants, COLUMNS) - x).reshape(COMPANY, chunks, 32)
    assert (error <= (peaks * 0.50001 / 127)[..., None]).all()
    assert (np.abs(whole).max(-1) == np.where(peaks > 0, 127, 0)).all()
    rest = quants[:, COLUMNS : COLUMNS + 20 * chunks].copy().view(np.int32)
    scales, scaled_sums = (rest[:, at : at + chunks].copy().view(np.float32) for at in (0, chunks))
    assert same_bits(scaled_sums, scales * whole.sum(-1).astype(np.float32))
    assert (rest[:, 2 * chunks : 3 * chunks] == whole.sum(-1)).all()
    halves = whole.reshape(COMPANY, -1, 16).sum(-1)
    assert (rest[:, 3 * chunks : 5 * chunks] == halves).all()


@cases(["Q4_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS", "F16"])
@pytest.mark.parametrize("sick", [np.nan, np.inf, -np.inf])
def test_an_activation_that_is_no_number_reaches_every_output_of_its_row(
    name: str, isa: Isa, sick: float
) -> None:
    for place in (0, 17, COLUMNS - 1):
        x = activations().copy()
        x[4, place] = sick
        found = multiply(weight(name), isa, x)[:, :OUTPUTS]
        assert not np.isfinite(found[4]).any()
        healthy = [0, 1, 2, 3, 5, 6, 7, 8]
        assert same_bits(found[healthy], product(name, isa)[healthy, :OUTPUTS])


# Rows


def tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(x.copy())


def assert_near(found: Array, expected: Array | torch.Tensor, tolerance: float = 1e-6) -> None:
    wanted = np.asarray(expected)
    assert found.shape == wanted.shape
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert error < tolerance, f"relative error {error:.1e}"


EPS = 1e-5


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_norms_are_those_of_the_reference(
    quantised: bool, post: bool, added: bool, chosen: bool
) -> None:
    rng = np.random.default_rng(4)
    rows, columns = 7, 96
    residual, block = (
        (rng.standard_normal((rows, columns + 16)) * 3).astype(np.float32) for _ in range(2)
    )
    gains = [rng.standard_normal(columns).astype(np.float32) for _ in range(2)]
    picked = np.array([5, 0, 3]) if chosen else np.arange(rows)
    x, y = residual.copy(), block.copy()
    out = np.zeros((len(picked), columns), np.float32)
    quants = np.zeros((len(picked), quantised_bytes(columns)), np.uint8)
    parameters = record(
        s.NORM,
        **{"x": x, "x_stride": x.strides[0], "added": y if added else 0},
        **{"added_stride": y.strides[0], "post_weight": gains[1] if post else 0},
        **{"weight": gains[0], "columns": columns, "eps": EPS},
        **{"out": out, "out_stride": out.strides[0]},
        **{"quantised": quants if quantised else 0, "quantised_stride": quants.strides[0]},
        **{"chosen": picked if chosen else 0, "rows": s.CHOSEN},
    )
    run_rows(kernel("norm", layers.norm), parameters, len(picked))

    expected = tensor(residual)[:, :columns].contiguous()
    if added:
        more = tensor(block)[:, :columns].contiguous()
        if post:
            reference.rms_norm(more, torch.from_numpy(gains[1]), EPS, more)
        expected += more
    assert_near(x[picked, :columns], expected[picked])
    assert same_bits(x[:, columns:], residual[:, columns:])
    normed = torch.empty_like(expected)
    reference.rms_norm(expected, torch.from_numpy(gains[0]), EPS, normed)
    assert_near(out, normed[picked])
    assert same_bits(quants, quantise(out) if quantised else np.zeros_like(quants))


def test_a_norm_without_a_weight_only_adds() -> None:
    x, y = activations(3, 64).copy(), activations(9, 64)[3:6].copy()
    parameters = record(
        s.NORM,
        **{"x": x, "x_stride": x.strides[0], "added": y, "added_stride": y.strides[0]},
        **{"columns": 64, "eps": EPS, "rows": s.ROWS},
    )
    run_rows(kernel("norm", layers.norm), parameters, 3)
    assert same_bits(x, activations(3, 64) + y)


def identity(columns: int) -> Array:
    """Tiles whose product with a row is that row."""
    raw = np.eye(columns, dtype=np.float32).view(np.uint8)
    tiles = zero_tiles(columns, columns, "F32")
    pack(library(), BY_NAME["F32"], raw, columns, tiles)
    return tiles


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("quantised", [False, True])
def test_gated_products_are_those_of_the_reference(activation: str, quantised: bool) -> None:
    rng = np.random.default_rng(5)
    rows, inner = 5, 96
    gate = (rng.standard_normal((rows, inner)) * 4).astype(np.float32)
    gate[3] = np.linspace(-120, 120, inner)
    gate[4, :6] = (0.0, 1e4, -1e4, 1e20, 1e-30, -1e-30)
    up = rng.standard_normal((rows, inner)).astype(np.float32)
    tiles = identity(inner)
    out = np.zeros((rows, 2 * inner), np.float32)
    quants = np.zeros((rows, quantised_bytes(inner)), np.uint8)
    parts = [
        record(
            s.PRODUCT,
            **{"tiles": tiles, "tile_bytes": tiles.shape[1], "count": inner // TILE_ROWS},
            **{"x": x, "x_stride": x.strides[0], "columns": inner},
            **{"out": out[:, part * inner :], "out_stride": out.strides[0], "rows": s.ROWS},
        )
        for part, x in enumerate((gate, up))
    ]
    address = library().address(f"product-F32-{BEST.name}", lambda: layers.product(BEST, "F32"))
    parameters = record(
        s.GATED,
        **{"gate_kernel": address, "gate": parts[0], "up_kernel": address, "up": parts[1]},
        **{"out": out, "up_out": out[:, inner:], "stride": out.strides[0]},
        **{"quantised": quants if quantised else 0, "quantised_stride": quants.strides[0]},
        **{"columns": inner, "count": inner // TILE_ROWS},
    )
    function = kernel(f"gated-{activation}", lambda: layers.gated(activation))
    run(function, parameters, rows=rows, each=4, units=4, row_block=3)

    expected = tensor(gate).double()
    reference.gated(expected, tensor(up).double(), activation)
    error = (torch.from_numpy(out[:, :inner]) - expected).abs()
    assert (error <= 1e-6 * expected.abs().clamp(min=1)).all()
    assert same_bits(quants, quantise(out[:, :inner].copy()) if quantised else quants * 0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_that_is_no_number_stays_none(activation: str) -> None:
    gate = np.array([[np.nan, np.inf, -np.inf, 1.0] * 8], np.float32)
    up = np.ones((1, 32), np.float32)
    # Zero tiles: the products are skipped, and what is there already is gated.
    out = np.concatenate([gate, up], axis=1)
    zero = record(s.PRODUCT, rows=s.CHOSEN)
    address = library().address(f"product-F32-{BEST.name}", lambda: layers.product(BEST, "F32"))
    parameters = record(
        s.GATED,
        **{"gate_kernel": address, "gate": zero, "up_kernel": address, "up": zero},
        **{"out": out, "up_out": out[:, 32:], "stride": out.strides[0], "columns": 32, "count": 2},
    )
    function = kernel(f"gated-{activation}", lambda: layers.gated(activation))
    run(function, parameters, rows=1, each=2, units=1)
    found = out[0, :32].reshape(8, 4)
    assert np.isnan(found[:, 0]).all()
    assert not np.isfinite(found[:, 1:3]).any()
    assert np.isfinite(found[:, 3]).all()


# Rotary embedding, K and V


KINDS = ("float32", "float16", "bfloat16")
# What has float16 has one form of these.
PAGED = pytest.mark.parametrize(
    ("isa", "kind"),
    [
        pytest.param(isa, kind, id=f"{isa.name}-{kind}")
        for isa in ISAS
        for kind in KINDS
        if isa == BEST or (isa == Isa.PORTABLE and kind == "float16") or EVERYTHING
    ],
)


def half_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def keys_in_memory(keys: torch.Tensor) -> torch.Tensor:
    """[blocks, tokens, heads, width] as the kernels keep it: sixteen keys side by side."""
    blocks, tokens, heads, width = keys.shape
    return keys.view(blocks, tokens // 16, 16, heads, width).permute(0, 3, 1, 4, 2).contiguous()


def values_in_memory(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(1, 2).contiguous()


def test_angles_are_those_of_float64() -> None:
    positions = np.array([0, 1, 77, 131071])
    frequencies = 1e6 ** -np.linspace(0, 1, 24)
    out = np.zeros((4, 48), np.float32)
    parameters = record(
        s.ANGLES,
        **{"positions": positions, "frequencies": frequencies, "scale": 1.25, "half": 24},
        **{"out": out, "stride": out.strides[0]},
    )
    run_rows(kernel("angles", layers.angles), parameters, 4, 3)
    angles = positions[:, None] * frequencies
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * 1.25
    assert np.abs(out - expected).max() < 1e-7


@PAGED
@pytest.mark.parametrize(
    ("interleaved", "width", "half", "tokens", "norms"),
    [(False, 64, 32, 16, True), (True, 80, 20, 32, False), (False, 16, 8, 48, False),
     (True, 256, 128, 16, True)],
)  # fmt: skip
def test_heads_are_turned_and_written_where_the_tables_say(
    isa: Isa, kind: str, interleaved: bool, width: int, half: int, tokens: int, norms: bool
) -> None:
    rng = np.random.default_rng(width)
    heads, kv_heads, rows, scale = 6, 2, 5, 0.3
    dtype: torch.dtype = getattr(torch, kind)
    every = heads + 2 * kv_heads
    qkv = rng.standard_normal((rows, every * width + 16)).astype(np.float32)
    before = tensor(qkv[:, : every * width]).view(rows, every, width)
    # One sequence with a plain table, one with a ring of two blocks.
    tables = np.array([[0, 7, 3, 5, 1], [2, 6, 2, 9, 9]])
    positions = np.array([2 * tokens - 1, 2 * tokens, 2 * tokens + 1, 3 * tokens - 1, 3 * tokens])
    slots = np.array([0, 0, 0, 1, 1])
    places = [(3, tokens - 1), (5, 0), (5, 1), (6, tokens - 1), (2, 0)]
    angles = rng.standard_normal((rows, 2 * half)).astype(np.float32)
    gains = [rng.standard_normal(width).astype(np.float32) for _ in range(2)]
    pools = [torch.full((10 * tokens * kv_heads * width,), torch.nan, dtype=dtype) for _ in "kv"]
    parameters = record(
        s.HEADS,
        **{"qkv": qkv, "stride": qkv.strides[0], "heads": heads, "kv_heads": kv_heads},
        **{"head_dim": width, "rotary_half": half, "eps": EPS, "query_scale": scale},
        **{"q_norm": gains[0] if norms else 0, "k_norm": gains[1] if norms else 0},
        **{"angles": angles, "angles_stride": angles.strides[0]},
        **{"keys": pools[0].data_ptr(), "values": pools[1].data_ptr()},
        **{"tables": tables, "table_stride": tables.strides[0], "block_tokens": tokens},
        **{"positions": positions, "slots": slots},
    )
    name = f"heads-{kind}-{interleaved}-{isa.name}"
    function = kernel(name, lambda: layers.heads(isa, kind, interleaved))
    run(function, parameters, rows=rows, each=7, units=-(-rows * every // 7))

    q, k = before[:, :heads].clone(), before[:, heads : heads + kv_heads].clone()
    v = before[:, heads + kv_heads :]
    cos, sin = (tensor(part) for part in (angles[:, :half], angles[:, half:]))
    for part, gain in ((q, gains[0]), (k, gains[1])):
        if norms:
            reference.rms_norm(part, torch.from_numpy(gain), EPS, part)
        scratch = torch.empty(rows * every * width)
        reference.rope(part, cos, sin, interleaved, scratch)
    found = torch.from_numpy(qkv[:, : heads * width].copy()).view(rows, heads, width)
    assert_near(found.numpy(), q * scale)
    keys, values = (torch.full((10, tokens, kv_heads, width), torch.nan) for _ in "kv")
    for row, (block, within) in enumerate(places):
        keys[block, within], values[block, within] = k[row], v[row]
    exact = values_in_memory(values.to(dtype)).flatten()
    assert torch.equal(pools[1].isnan(), exact.isnan()), "a value lies elsewhere"
    numbers = ~exact.isnan()
    assert torch.equal(half_bits(pools[1])[numbers], half_bits(exact)[numbers])
    wanted, written = keys_in_memory(keys).flatten(), pools[0].float()
    assert torch.equal(written.isnan(), wanted.isnan()), "a key lies elsewhere"
    rounding = max(1e-6, torch.finfo(dtype).eps)
    assert_near(written.nan_to_num().numpy(), wanted.nan_to_num(), rounding)


@EVERY_ISA
def test_every_half_widens_to_the_bits_of_numpy(isa: Isa) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    raw = halves.view(np.uint8)[None]
    tiles = zero_tiles(1, halves.size, "F16")
    pack(library(), BY_NAME["F16"], raw, halves.size, tiles)
    tokens, out = np.zeros(1, np.int64), np.zeros((1, halves.size), np.float32)
    parameters = record(
        s.EMBEDDING,
        **{"tiles": tiles, "tile_bytes": tiles.shape[1], "columns": halves.size},
        **{"tokens": tokens, "scale": 1.0, "out": out, "out_stride": 0},
    )
    function = kernel(f"embedding-F16-{isa.name}", lambda: layers.embedding(isa, "F16"))
    run_rows(function, parameters, 1)
    expected = halves.astype(np.float32)
    numbers = ~np.isnan(expected)
    assert (np.isnan(out[0]) == ~numbers).all()
    assert same_bits(out[0][numbers], expected[numbers])


def difficult_floats() -> Array:
    """float32 that round to halves in every way: exact, ties, next to ties, tiny, huge, any."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves = np.sort(halves[np.isfinite(halves)])
    ties = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    largest = np.float32(65520.0)  # the tie between the largest half and infinity
    ties = np.concatenate([ties, [largest, -largest]]).astype(np.float32)
    around = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    rng = np.random.default_rng(8)
    anything = rng.integers(0, 1 << 32, 1 << 17, dtype=np.uint32).view(np.float32)
    tiny = rng.uniform(-7e-5, 7e-5, 1 << 16).astype(np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38], np.float32)
    every = np.concatenate([halves.astype(np.float32), ties, *around, anything, tiny, edges])
    return np.resize(every, -(-every.size // 4096) * 4096).astype(np.float32)


def stored_values(isa: Isa, kind: str, x: Array) -> torch.Tensor:
    """`x` narrowed by the kernel that writes V, each row of 4096 numbers in a block of its own."""
    rows, width, kv_heads = x.size // 4096, 256, 16
    qkv = np.zeros((rows, 3 * 4096), np.float32)
    qkv[:, 2 * 4096 :] = x.reshape(rows, 4096)
    pools = [torch.zeros(rows, kv_heads, 16, width, dtype=getattr(torch, kind)) for _ in "kv"]
    tables, slots = np.array([[0, *range(rows)]]), np.zeros(rows, np.int64)
    positions, angles = np.arange(rows) * 16, np.zeros(2, np.float32)
    parameters = record(
        s.HEADS,
        **{"qkv": qkv, "stride": qkv.strides[0], "heads": 16, "kv_heads": kv_heads},
        **{"head_dim": width, "query_scale": 1.0, "angles": angles, "tables": tables},
        **{"keys": pools[0].data_ptr(), "values": pools[1].data_ptr(), "block_tokens": 16},
        **{"positions": positions, "slots": slots},
    )
    function = kernel(f"heads-{kind}-False-{isa.name}", lambda: layers.heads(isa, kind, False))
    run(function, parameters, rows=rows, each=48 * rows, units=1)
    return pools[1][:, :, 0].flatten()


@PAGED
def test_values_narrow_to_the_bits_of_numpy_and_torch(isa: Isa, kind: str) -> None:
    x = difficult_floats()
    found = stored_values(isa, kind, x)
    if kind == "float16":
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(x.astype(np.float16))
    else:
        expected = torch.from_numpy(x).to(getattr(torch, kind))
    numbers = ~torch.from_numpy(np.isnan(x))
    assert torch.equal(found.isnan(), ~numbers)
    assert torch.equal(half_bits(found)[numbers], half_bits(expected)[numbers])


# Attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sequence's queries: `rows` of them from position `offset` on."""

    offset: int
    rows: int
    width: int = 64
    tokens: int = 16
    window: int | None = None
    ring: bool = False
    cap: float = 0.0
    heads: int = 6
    kv_heads: int = 2

    @property
    def end(self) -> int:
        return self.offset + self.rows

    @property
    def low(self) -> int:
        """The first position whose memory may be read."""
        return 0 if self.window is None else max(0, self.offset - self.window + 1) // 16 * 16


BLOCKS = 40
FIRST = 2  # rows of another sequence in front


class Paged:
    """Queries and a pool in which only what the case may see are numbers."""

    def __init__(self, case: Case, kind: str, seed: int = 0) -> None:
        self.case, self.kind = case, kind
        dtype: torch.dtype = getattr(torch, kind)
        generator = torch.Generator().manual_seed(seed)
        every = case.heads + 2 * case.kv_heads
        self.qkv = torch.randn(FIRST + case.rows, every, case.width, generator=generator)
        blocks = -(-case.end // case.tokens)
        if case.ring:
            assert case.window is not None
            blocks = min(blocks, -(-(case.window - 1 + case.rows) // case.tokens) + 1)
        self.table = torch.randperm(BLOCKS, generator=generator)[:blocks].tolist()
        shape = (BLOCKS, case.tokens, case.kv_heads, case.width)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in "kv")
        for position in range(case.low, case.end):
            block, within = self.table[position // case.tokens % blocks], position % case.tokens
            for pool in (self.keys, self.values):
                new = torch.randn(case.kv_heads, case.width, generator=generator)
                pool[block, within] = new.to(dtype)

    def attend(
        self, isa: Isa, *, tiles: list[tuple[int, int]] | None = None, each: int = 1
    ) -> Array:
        """The kernel's result, float32 [rows, heads * width]; quantised as well where it may be."""
        case = self.case
        tiles = tiles or [(0, case.rows)]
        qkv = self.qkv.flatten(1).numpy()
        keys, values = keys_in_memory(self.keys), values_in_memory(self.values)
        # The sequence is in slot 1.
        table = np.full((2, 1 + len(self.table)), BLOCKS - 1)
        table[1] = [len(self.table) if case.ring else 0, *self.table]
        positions = np.array([*[0] * FIRST, *range(case.offset, case.end)])
        slots = np.array([*[0] * FIRST, *[1] * case.rows])
        stride = 4 * (-(-case.end // 16) * 16 + 16)
        attended = np.array([(FIRST + first, rows) for first, rows in tiles])
        lines = max(rows for _, rows in tiles) * each
        scratch = np.full(lines * (8 * case.width + stride) + 2 * stride, 255, np.uint8)
        shape = (case.rows + FIRST, case.heads * case.width)
        out = np.full(shape, 7.0, np.float32)
        fused = case.width % 32 == 0
        quants = np.zeros((len(out), quantised_bytes(shape[1])), np.uint8)
        parameters = record(
            s.ATTENTION,
            **{"qkv": qkv, "stride": qkv.strides[0], "heads": case.heads},
            **{"kv_heads": case.kv_heads, "head_dim": case.width, "softcap": case.cap},
            **{"window": case.window or 0, "block_tokens": case.tokens},
            **{"keys": keys.data_ptr(), "values": values.data_ptr()},
            **{"tables": table, "table_stride": table.strides[0]},
            **{"positions": positions, "slots": slots},
            **{"tiles": attended},
            **{"out": out, "out_stride": out.strides[0]},
            **{"quantised": quants if fused else 0, "quantised_stride": quants.strides[0]},
            **{"scratch": scratch, "scratch_stride": scratch.size, "score_stride": stride},
        )
        function = kernel(
            f"attention-{self.kind}-{isa.name}", lambda: layers.attention(isa, self.kind)
        )
        units = len(tiles) * case.heads // each
        run(function, parameters, rows=len(out), each=each, units=units)
        assert (out[:FIRST] == 7.0).all()
        if fused:
            assert same_bits(quants[FIRST:], quantise(out[FIRST:].copy()))
        return out[FIRST:]

    def expected(self) -> torch.Tensor:
        """The plain kernel's result, float32 [rows, heads * width]."""
        case = self.case
        first = 0 if case.window is None else max(0, case.offset - case.window + 1) // case.tokens
        numbers = range(first, -(-case.end // case.tokens))
        span = reference.KeySpan(
            first_row=0,
            rows=case.rows,
            offset=case.offset,
            window=case.window,
            first_key=first * case.tokens,
            keys=case.end - first * case.tokens,
            blocks=torch.tensor([self.table[number % len(self.table)] for number in numbers]),
        )
        shape = (-(-case.end // 32) * 32 + 32, case.kv_heads, case.width)
        gathered = [torch.zeros(shape, dtype=self.keys.dtype) for _ in "kv"]
        wide = [torch.zeros(shape) if self.kind != "float32" else each for each in gathered]
        lines = reference.padded_rows(case.rows * case.heads // case.kv_heads)
        scratch = reference.AttentionScratch(
            keys=gathered[0],
            values=gathered[1],
            widened_keys=wide[0],
            widened_values=wide[1],
            queries=torch.zeros(case.kv_heads * lines * case.width),
            scores=torch.zeros(case.kv_heads * lines * shape[0]),
            hidden=torch.zeros(case.kv_heads * lines * shape[0], dtype=torch.bool),
            result=torch.zeros(case.kv_heads * lines * case.width),
            positions=torch.arange(shape[0]),
        )
        queries = self.qkv[FIRST:, : case.heads].contiguous()
        out = torch.empty_like(queries)
        # The plain kernel multiplies keys before the window, which are real ones, by 0.
        keys, values = self.keys.nan_to_num(), self.values.nan_to_num()
        reference.attention(queries, keys, values, span, 1.0, case.cap, scratch, out)
        return out.flatten(1)


CASES_OF_ATTENTION = [
    Case(offset=0, rows=1, width=16),
    Case(offset=30, rows=1, width=64),
    Case(offset=31, rows=2, width=80, tokens=32),
    Case(offset=15, rows=3, width=256),
    Case(offset=0, rows=11, width=80),
    Case(offset=200, rows=5, width=64, tokens=32),
    Case(offset=200, rows=8, width=16, window=24, ring=True),
    Case(offset=77, rows=4, width=64, window=24, tokens=32, ring=True),
    Case(offset=100, rows=1, width=64, window=1, ring=True),
    Case(offset=10, rows=12, width=16, window=40),
    Case(offset=130, rows=9, width=256, window=64, ring=True, cap=5.0),
    Case(offset=60, rows=2, width=80, cap=2.0),
    Case(offset=47, rows=1, width=64, heads=8, kv_heads=1),
    Case(offset=47, rows=3, width=64, heads=4, kv_heads=4),
]
ATTENTION = pytest.mark.parametrize("case", CASES_OF_ATTENTION, ids=str)


@PAGED
@ATTENTION
def test_attention_is_that_of_the_reference(isa: Isa, kind: str, case: Case) -> None:
    paged = Paged(case, kind)
    group = case.heads // case.kv_heads
    expected = paged.expected()
    assert expected.isfinite().all()
    found = paged.attend(isa)
    assert np.isfinite(found).all(), "memory that no query may see was read"
    assert_near(found, expected, 1e-5)
    assert same_bits(found, paged.attend(isa, each=group)), "heads computed together differ"
    assert same_bits(found, paged.attend(BEST)), "forms differ"


@PAGED
@ATTENTION
def test_a_query_s_bits_do_not_depend_on_those_beside_it(isa: Isa, kind: str, case: Case) -> None:
    paged = Paged(case, kind, seed=1)
    together = paged.attend(isa)
    alone = [(row, 1) for row in range(case.rows)]
    group = case.heads // case.kv_heads
    assert same_bits(together, paged.attend(isa, tiles=alone, each=group))
    pairs = [(row, min(2, case.rows - row)) for row in range(0, case.rows, 2)]
    assert same_bits(together, paged.attend(isa, tiles=pairs))


@pytest.mark.parametrize(
    ("sick", "cap"),
    [
        (np.nan, 0.0),
        (np.inf, 0.0),  # a cap makes a number of it, here and in the plain kernel
        (np.nan, 5.0),
    ],
)
def test_a_query_that_is_no_number_has_no_result_that_is_one(sick: float, cap: float) -> None:
    paged = Paged(Case(offset=20, rows=2, cap=cap), "float16")
    paged.qkv[FIRST, 0, 3] = sick
    out = paged.attend(BEST).reshape(2, 6, 64)
    assert np.isfinite(out[1]).all() and np.isfinite(out[0, 1:]).all()
    assert not np.isfinite(out[0, 0]).any()


@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_key_or_value_that_is_no_number_is_not_lost(which: str) -> None:
    paged = Paged(Case(offset=20, rows=2), "float16")
    pool = paged.keys if which == "keys" else paged.values
    pool[paged.table[1], 20 - 16, 1, 5] = torch.nan
    out = paged.attend(BEST).reshape(2, 6, 64)
    sick = out[:, 3:] if which == "keys" else out[:, 3:, 5]
    assert np.isnan(sick).all()
    assert np.isfinite(out[:, :3]).all(), "the other head of keys and values is sound"


# The choice


def choose(logits: Array, vocabulary: int, cap: float = 0.0) -> tuple[list[int], Array]:
    """The most likely tokens, and the logits as they are then."""
    capped = logits.copy()
    best = np.full(len(logits), -7)
    peaks = np.zeros(len(logits), np.float32)
    draws = np.zeros((len(logits), sampling.DRAW_BYTES // 8))  # none by chance
    parameters = record(
        s.CHOICE,
        **{"logits": capped, "stride": capped.strides[0], "padded": capped.shape[1]},
        **{"count": vocabulary, "softcap": cap, "draws": draws, "tokens": best, "peaks": peaks},
    )
    function = kernel("choice", sampling.choice)
    run(function, parameters, rows=1, chosen=len(logits), each=1, units=len(logits))
    return best.tolist(), capped


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 101, 112])
def test_the_lowest_of_equally_likely_tokens_is_chosen(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    # Few different numbers, so that most maxima have equals; what lies behind is larger.
    logits = rng.integers(-3, 4, (50, 112)).astype(np.float32)
    logits[:, vocabulary:] = 9.0
    best, after = choose(logits, vocabulary)
    assert best == logits[:, :vocabulary].argmax(1).tolist()
    assert same_bits(after, logits)


@pytest.mark.parametrize("vocabulary", [5, 16, 101])
def test_rows_that_are_no_numbers_are_told_from_those_that_are(vocabulary: int) -> None:
    rows = np.random.default_rng(0).standard_normal((7, 112)).astype(np.float32)
    rows[0, vocabulary - 1] = np.nan
    rows[1, 0] = np.nan
    rows[2] = -np.inf
    rows[3, vocabulary - 1] = np.inf
    rows[4, :] = -np.inf
    rows[4, vocabulary - 1] = -3e38
    rows[5, vocabulary:] = np.nan  # of nobody
    best, _ = choose(rows, vocabulary)
    assert best[:5] == [-1, -1, 0, vocabulary - 1, vocabulary - 1]
    assert best[5:] == rows[5:, :vocabulary].argmax(1).tolist()


def test_softcapped_logits_are_those_of_the_reference() -> None:
    logits = (np.random.default_rng(1).standard_normal((3, 112)) * 40).astype(np.float32)
    logits[0, :5] = (1e30, -1e30, 0.0, 1e-20, 3e38)
    _, found = choose(logits, 101, 30.0)
    expected = tensor(logits)
    reference.softcap(expected, 30.0)
    assert_near(found, expected)


def test_a_softcap_keeps_a_logit_that_is_no_number() -> None:
    logits = np.random.default_rng(1).standard_normal((2, 112)).astype(np.float32)
    logits[1, 40] = np.nan
    best, _ = choose(logits, 101, 30.0)
    assert best[1] == -1
