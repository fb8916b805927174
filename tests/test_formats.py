"""Unpacking gives the bits that the gguf package's dequantisers give."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize

from asyncllm.checkpoint import unpack as unpack_module
from asyncllm.checkpoint.formats import FORMATS, UNSUPPORTED, Format
from asyncllm.checkpoint.unpack import DECODERS, _PerThread
from tests.gguf_bytes import BY_NAME, random_blocks

ALL = pytest.mark.parametrize("layout", FORMATS.values(), ids=lambda layout: layout.name)
FAST = pytest.mark.parametrize("layout", [BY_NAME[name] for name in DECODERS], ids=lambda f: f.name)


def reference(layout: Format, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        values = dequantize(raw.copy(), GGMLQuantizationType(layout.type_id))
    return np.asarray(values, dtype=np.float32)


def unpack(layout: Format, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    columns = raw.shape[1] // layout.block_bytes * layout.block_elements
    out = torch.full((len(raw), columns), 7.0)
    layout.unpack(torch.from_numpy(raw.copy()), out)
    return out.numpy()


def assert_same_bits(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    assert ours.shape == theirs.shape
    differ = ours.view(np.int32) != np.ascontiguousarray(theirs).view(np.int32)
    differ &= ~(np.isnan(ours) & np.isnan(theirs))
    assert not differ.any(), f"{differ.sum()} of {differ.size} weights differ"


def test_every_type_the_gguf_package_dequantises_has_a_format() -> None:
    known = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, *_type_traits}
    assert set(FORMATS) == {int(kind) for kind in known}


def test_names_and_sizes_are_those_of_the_gguf_package() -> None:
    for type_id, layout in FORMATS.items():
        kind = GGMLQuantizationType(type_id)
        assert (layout.type_id, layout.name) == (type_id, kind.name)
        assert (layout.block_elements, layout.block_bytes) == GGML_QUANT_SIZES[kind]


def test_types_called_unsupported_are_the_rest_of_the_gguf_package_s() -> None:
    rest = {int(kind): kind.name for kind in GGMLQuantizationType if kind not in FORMATS}
    assert dict(UNSUPPORTED) == rest


@ALL
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 1), (1, 5), (7, 3), (33, 8)])
def test_unpacking_gives_the_bits_of_the_reference(layout: Format, rows: int, blocks: int) -> None:
    rng = np.random.default_rng(rows * 100 + blocks)
    columns = blocks * max(layout.block_elements, 32)
    raw = random_blocks(layout, rows, columns, rng)
    ours = unpack(layout, raw)
    assert np.isfinite(ours).all()
    assert np.abs(ours).max() > 0
    assert_same_bits(ours, reference(layout, raw).reshape(rows, columns))


@ALL
def test_any_bytes_at_all_unpack_to_the_bits_of_the_reference(layout: Format) -> None:
    # Scales that are infinite, subnormal or no numbers included: a damaged tensor is no crash.
    rng = np.random.default_rng(5)
    width = max(layout.block_elements, 256)
    raw = rng.integers(0, 256, (64, layout.row_bytes(width)), dtype=np.uint8)
    assert_same_bits(unpack(layout, raw), reference(layout, raw).reshape(64, width))


@FAST
def test_tiles_join_without_a_seam(layout: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.checkpoint.unpack.TILE_WEIGHTS", 1024)
    raw = random_blocks(layout, 13, 768, np.random.default_rng(2))
    assert_same_bits(unpack(layout, raw), reference(layout, raw).reshape(13, 768))


@FAST
def test_unpacking_a_slice_of_rows_gives_those_rows(layout: Format) -> None:
    raw = torch.from_numpy(random_blocks(layout, 9, 512, np.random.default_rng(3)))
    whole, part = torch.empty(9, 512), torch.empty(4, 512)
    layout.unpack(raw, whole)
    layout.unpack(raw[3:7], part)
    assert torch.equal(whole[3:7].view(torch.int32), part.view(torch.int32))


@FAST
def test_unpacking_works_in_and_out_of_inference_mode_by_turns(
    layout: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncllm.checkpoint.unpack._per_thread", _PerThread())
    unpack_module._codebook.cache_clear()
    raw = random_blocks(layout, 4, 512, np.random.default_rng(6))
    with torch.inference_mode():
        first = unpack(layout, raw)
    second = unpack(layout, raw)
    with torch.inference_mode():
        third = unpack(layout, raw)
    assert_same_bits(first, second)
    assert_same_bits(first, third)


def test_no_rows_unpack_to_no_rows() -> None:
    for layout in FORMATS.values():
        layout.unpack(
            torch.empty((0, layout.row_bytes(256)), dtype=torch.uint8), torch.empty(0, 256)
        )


@pytest.mark.parametrize(
    ("raw", "out"),
    [
        (torch.zeros(2, 20, dtype=torch.uint8), torch.zeros(2, 64)),
        (torch.zeros(2, 20, dtype=torch.uint8), torch.zeros(3, 32)),
        (torch.zeros(2, 20, dtype=torch.uint8), torch.zeros(2, 32, dtype=torch.float16)),
        (torch.zeros(2, 20, dtype=torch.int8), torch.zeros(2, 32)),
        (torch.zeros(2, 40, dtype=torch.uint8)[:, :20], torch.zeros(2, 32)),
        (torch.zeros(2, 20, dtype=torch.uint8), torch.zeros(2, 64)[:, :32]),
        (torch.zeros(40, dtype=torch.uint8), torch.zeros(64)),
    ],
    ids=["columns", "rows", "float16", "int8", "strided raw", "strided out", "vectors"],
)
def test_tensors_of_another_shape_or_type_are_refused(raw: torch.Tensor, out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"Q4_1 (takes|rows)|unpacking Q4_1"):
        BY_NAME["Q4_1"].unpack(raw, out)


def test_columns_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="Q4_K rows are multiples of 256 weights, not 128"):
        BY_NAME["Q4_K"].row_bytes(128)


def test_threads_do_not_share_scratch_memory() -> None:
    layout = BY_NAME["Q4_1"]
    raws = [random_blocks(layout, 64, 2048, np.random.default_rng(seed)) for seed in range(4)]
    wanted = [reference(layout, raw).reshape(64, 2048) for raw in raws]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(10):
                assert_same_bits(unpack(layout, raws[index]), wanted[index])
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(raws))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@FAST
def test_temporaries_do_not_grow_with_the_rows(
    layout: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = 4096
    monkeypatch.setattr("asyncllm.checkpoint.unpack.TILE_WEIGHTS", tile)
    monkeypatch.setattr("asyncllm.checkpoint.unpack._per_thread", _PerThread())
    sizes = []
    for rows in (32, 320):
        raw = torch.from_numpy(random_blocks(layout, rows, 1024, np.random.default_rng(4)))
        layout.unpack(raw, torch.empty(rows, 1024))
        sizes.append(unpack_module._per_thread.scratch.nbytes)
    assert sizes[0] == sizes[1] <= 8 * tile


def test_the_table_of_formats_loads_neither_torch_nor_gguf() -> None:
    program = (
        "import sys, types; package = types.ModuleType('asyncllm');"
        "package.__path__ = ['asyncllm']; sys.modules['asyncllm'] = package;"
        "import asyncllm.checkpoint.checkpoint;"
        "sys.exit(bool({'torch', 'gguf', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 64), (7, 96), (33, 256), (910, 576)])
def test_paired_weights_are_the_unpacked_ones_in_another_order(rows: int, columns: int) -> None:
    layout = BY_NAME["Q4_1"]
    assert unpack_module.unpacks_paired(layout, torch.device("cpu"))
    rng = np.random.default_rng(rows)
    noise = rng.integers(0, 256, (rows, layout.row_bytes(columns)), dtype=np.uint8)
    for raw in (random_blocks(layout, rows, columns, rng), noise):
        paired = unpack_module.unpack_paired(torch.from_numpy(raw.copy()), columns)
        in_order = torch.from_numpy(unpack(layout, raw))
        assert_same_bits(paired.numpy(), unpack_module.paired_columns(in_order).numpy())
