from __future__ import annotations

import pytest
import torch

from asyncllm.checkpoint.formats import FORMATS
from asyncllm.kernels.cpu.tiles import LAYOUTS
from asyncllm.kernels.cuda.weights import FLOATS, joined, unpacked, upload
from tests.cuda_weights import BY_NAME, random_rows

CPU = torch.device("cpu")
EXACT = [name for name in BY_NAME if name in LAYOUTS or name in FLOATS]
WIDENED = [name for name in BY_NAME if name not in EXACT]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("columns", [64, 288, 512])
def test_planes_hold_the_bits_of_the_checkpoint(name: str, columns: int) -> None:
    layout = BY_NAME[name]
    if columns % layout.block_elements:
        columns = 256 * (1 + columns // 256)
    raw = random_rows(layout, 7, columns)
    expected = torch.empty(7, columns)
    layout.unpack(raw, expected)
    weight = upload(layout, raw, columns, CPU)
    assert weight.form == name
    assert torch.equal(unpacked(weight), expected)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_scales_beyond_numbers_stay_what_they_are(name: str) -> None:
    layout = BY_NAME[name]
    raw = torch.full((1, layout.row_bytes(256)), 255, dtype=torch.uint8)
    assert unpacked(upload(layout, raw, 256, CPU)).isnan().all()


@pytest.mark.parametrize("name", WIDENED)
def test_other_formats_become_float16(name: str) -> None:
    layout = BY_NAME[name]
    raw = torch.zeros(3, layout.row_bytes(256), dtype=torch.uint8)
    raw[1] = 1
    expected = torch.empty(3, 256)
    layout.unpack(raw, expected)
    weight = upload(layout, raw, 256, CPU)
    assert weight.form == "F16"
    assert torch.equal(weight.planes["values"], expected.half())


def test_weights_beyond_float16_become_bfloat16() -> None:
    layout = BY_NAME["TQ2_0"]
    raw = torch.full((1, layout.row_bytes(256)), 2, dtype=torch.uint8)
    raw[:, -2:] = torch.tensor([[0xFF, 0x7B]], dtype=torch.uint8)  # 65504, doubled by some weights
    raw[:, 0] = 3
    expected = torch.empty(1, 256)
    layout.unpack(raw, expected)
    weight = upload(layout, raw, 256, CPU)
    assert expected.max() > 65504
    assert weight.form == "BF16"
    assert torch.equal(weight.planes["values"], expected.bfloat16())


def test_planes_cost_hardly_more_than_the_checkpoint() -> None:
    for name in EXACT:
        layout = BY_NAME[name]
        raw = random_rows(layout, 4, 512)
        # Scales of 4 and 6 bits are bytes here.
        assert upload(layout, raw, 512, CPU).nbytes <= raw.nbytes * (
            1.2 if name == "Q2_K" else 1.04
        )


def test_many_slabs_make_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.kernels.cuda.weights._SLAB_WEIGHTS", 1024)
    layout = BY_NAME["Q5_K"]
    raw = random_rows(layout, 7, 512)
    expected = torch.empty(7, 512)
    layout.unpack(raw, expected)
    assert torch.equal(unpacked(upload(layout, raw, 512, CPU)), expected)


def test_joined_weights_and_slices_keep_their_rows() -> None:
    layout = BY_NAME["Q8_0"]
    weights = [upload(layout, random_rows(layout, n, 96, n), 96, CPU) for n in (2, 5)]
    both = joined(weights)
    assert torch.equal(unpacked(both), torch.cat([unpacked(weight) for weight in weights]))
    assert torch.equal(unpacked(both.slice(2, 7)), unpacked(weights[1]))


def test_weights_of_two_forms_do_not_join() -> None:
    weights = [
        upload(BY_NAME[n], random_rows(BY_NAME[n], 2, 32), 32, CPU) for n in ("Q8_0", "Q4_0")
    ]
    with pytest.raises(ValueError, match="differ"):
        joined(weights)


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="Q8_0 weight of 64 columns"):
        upload(BY_NAME["Q8_0"], torch.zeros(2, 34, dtype=torch.uint8), 64, CPU)
    assert len(FORMATS) == len(BY_NAME)
