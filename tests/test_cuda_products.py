from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.cpu.tiles import LAYOUTS
from asyncllm.kernels.cuda.weights import DeviceWeight, unpacked, upload
from tests.cuda_weights import BY_NAME, quantised, random_rows

_REASON = "kernels for GPUs need triton"
products: Any = pytest.importorskip("asyncllm.kernels.cuda.products", reason=_REASON)
norms: Any = pytest.importorskip("asyncllm.kernels.cuda.rows", reason=_REASON)
tensor_cores: Any = pytest.importorskip("asyncllm.kernels.cuda.tensor_cores", reason=_REASON)
unpacking: Any = pytest.importorskip("asyncllm.kernels.cuda.unpacking", reason=_REASON)

FORMS = [name for name in LAYOUTS if name in BY_NAME]
EMULATED: bool = products.EMULATED
DEVICE = torch.device("cpu" if EMULATED else "cuda")
pytestmark = pytest.mark.skipif(
    not EMULATED and not torch.cuda.is_available(),
    reason="needs a GPU, or the interpreter (TRITON_INTERPRET=1)",
)


def weight_of(name: str, rows: int, columns: int, seed: int = 0) -> DeviceWeight:
    layout = BY_NAME[name]
    return upload(layout, random_rows(layout, rows, columns, seed), columns, DEVICE)


def width(name: str, index: int) -> int:
    """Columns, some no multiple of anything but a block."""
    if BY_NAME[name].block_elements == 256:
        return (256, 768, 1280)[index % 3]
    return (64, 288, 576, 640)[index % 4]


def activations(rows: int, columns: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


def on_device(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part.to(DEVICE) for part in rows)


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)


def check(out: Tensor, expected: Tensor, first: int = 0, tolerance: float = 1e-5) -> None:
    """What was to be written is right, and nothing else was written."""
    rows, columns = expected.shape
    written = out[:rows, first : first + columns].double().cpu()
    assert (written - expected).abs().max() < tolerance * expected.abs().max()
    assert int(out.isnan().sum()) == out.numel() - expected.numel()


def product(exact: Tensor, weight: DeviceWeight) -> Tensor:
    return exact @ unpacked(weight).double().cpu().t()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("name", FORMS)
def test_few_rows_are_exact_for_the_same_activations(name: str, rows: int) -> None:
    weight = weight_of(name, 3 if rows < 5 else 2, width(name, rows))
    x, exact = quantised(activations(rows, weight.columns))
    out = poisoned(rows + 1, 5)
    products.few_rows(weight, on_device(x), out)
    check(out, product(exact, weight))


@pytest.mark.parametrize(("name", "columns"), [("Q4_K", 5376), ("Q6_K", 5120), ("Q5_1", 5152)])
@pytest.mark.parametrize("rows", [1, 2])
def test_long_rows_take_steps(name: str, columns: int, rows: int) -> None:
    weight = weight_of(name, 5, columns)
    x, exact = quantised(activations(rows, columns))
    out = poisoned(rows, 6)
    products.few_rows(weight, on_device(x), out, config=(1, 2))
    check(out, product(exact, weight))


@pytest.mark.parametrize(("name", "rows"), [("Q4_K", 1), ("Q8_0", 2)])
def test_every_configuration_gives_the_product(name: str, rows: int) -> None:
    weight = weight_of(name, 3, 1280)
    x, exact = quantised(activations(rows, 1280))
    configs = products.configs(weight, rows)
    assert products.default_config(weight, rows) in configs
    for config in configs:
        out = poisoned(rows, 3)
        products.few_rows(weight, on_device(x), out, config=config)
        check(out, product(exact, weight))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "F16"])
def test_residual_and_bias_are_added_beside_other_results(name: str) -> None:
    weight = weight_of(name, 7, 512)
    x, exact = quantised(activations(3, 512))
    residual, bias = activations(3, 7, 2), activations(1, 7, 3)[0]
    out = poisoned(3, 12)
    out[:, 2:9] = residual.to(DEVICE)
    taken = exact.float().to(DEVICE) if name == "F16" else on_device(x)
    products.few_rows(weight, taken, out, residual=out[:, 2:9], bias=bias.to(DEVICE), out_offset=2)
    check(out, product(exact, weight) + residual.double() + bias.double(), first=2)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("name", "second"), [("Q4_K", "Q6_K"), ("Q6_K", "Q4_K"), ("Q8_0", "Q5_1")])
def test_two_forms_are_one_launch(name: str, second: str, rows: int) -> None:
    weight, other = weight_of(name, 10, 1280), weight_of(second, 7, 1280, 4)
    x, exact = quantised(activations(rows, 1280))
    out = poisoned(rows, 21)
    products.few_rows(weight, on_device(x), out, beside=other, out_offset=3)
    expected = torch.cat([product(exact, weight), product(exact, other)], 1)
    check(out, expected, first=3)


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("Q4_K", 1, 512), ("Q6_K", 4, 1280), ("Q5_0", 2, 576)]
)
def test_a_product_completes_the_norm_of_its_rows(
    name: str, rows: int, columns: int, gated: bool
) -> None:
    weight, other = weight_of(name, 7, columns), weight_of(name, 7, columns, 5)
    x = activations(rows, columns) * torch.tensor([[3.0], [1e-3], [0.0], [50.0]])[:rows]
    scales = activations(1, columns, 9)[0].to(DEVICE)
    residual = activations(rows, 7, 2)
    half = on_device(quantised(torch.zeros(rows, columns))[0])
    squares = poisoned(rows, norms.half_norm_parts(columns))
    norms.half_norm(x.to(DEVICE), scales, half, squares)
    normed = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    normed *= scales.cpu().double()
    expected = product(normed, weight)
    how: dict[str, Any] = {"squares": squares, "eps": 1e-5}
    if gated:
        expected = torch.nn.functional.silu(expected) * product(normed, other)
        how |= {"up": other}
    out = poisoned(rows, 7)
    products.few_rows(weight, half, out, **how, residual=residual.to(DEVICE))
    # What rounding to int8 costs, in gate and up.
    check(out, expected + residual.double(), tolerance=6e-2 if gated else 2e-2)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("name", "rows"), [("Q4_K", 1), ("Q6_K", 3), ("Q4_0", 2), ("BF16", 2)])
def test_gate_and_up_are_one_launch(name: str, rows: int, activation: str) -> None:
    gate, up = weight_of(name, 5, 512, 1), weight_of(name, 5, 512, 2)
    x, exact = quantised(activations(rows, 512) / 8)
    out = poisoned(rows, 6)
    taken = exact.float().to(DEVICE) if name == "BF16" else on_device(x)
    products.few_rows(gate, taken, out, up=up, activation=activation)
    first, second = product(exact, gate), product(exact, up)
    if activation == "silu":
        first = torch.nn.functional.silu(first)
    else:
        first = torch.nn.functional.gelu(first, approximate="tanh")
    check(out, first * second)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_floats_are_multiplied_as_they_are(name: str, rows: int) -> None:
    weight = weight_of(name, 5, 576)
    x = activations(rows, 576)
    out = poisoned(rows + 1, 6)
    products.few_rows(weight, x.to(DEVICE), out)
    check(out, product(x.double(), weight))


def test_a_row_that_is_no_number_spoils_only_itself() -> None:
    weight = weight_of("Q4_K", 3, 256)
    (words, scales, sums), exact = quantised(activations(3, 256))
    scales[1, 2] = float("nan")
    out = poisoned(3, 3)
    products.few_rows(weight, on_device((words, scales, sums)), out)
    assert out[1].isnan().all()
    expected = product(exact, weight)
    for row in (0, 2):
        assert torch.allclose(out[row].double().cpu(), expected[row], rtol=1e-4, atol=1e-4)


def tensor_product(
    weight: DeviceWeight, x: Tensor, config: Any = None, bias: Tensor | None = None
) -> None:
    rows = len(x)
    out = poisoned(rows + 1, weight.rows + 3)
    partial = poisoned(8, rows * weight.rows).view(-1)
    bias = bias if bias is None else bias.to(DEVICE)
    # Column 4c + 2h + e of 16 is at 2c + 8h + e.
    ordered = x.half().view(rows, -1, 4, 2, 2).transpose(2, 3).reshape(rows, -1).to(DEVICE)
    tensor_cores.tensor_rows(weight, ordered, out, partial, bias=bias, out_offset=2, config=config)
    expected = product(x.half().double(), weight)
    if bias is not None:
        expected += bias.double().cpu()
    # Scales and weights are rounded to float16.
    check(out, expected, first=2, tolerance=2e-3)


@pytest.mark.parametrize("rows", [9, 40])
@pytest.mark.parametrize("name", FORMS)
def test_tensor_cores_give_the_product_of_rounded_weights(name: str, rows: int) -> None:
    weight = weight_of(name, 70 if rows == 9 else 64, width(name, rows))
    tensor_product(weight, activations(rows, weight.columns))


@pytest.mark.parametrize("config", [(4, 64, 4, 1, 0), (4, 64, 8, 4, 0), (8, 128, 4, 2, 0)])
def test_tensor_cores_share_the_columns_of_a_row(config: Any) -> None:
    weight = weight_of("Q6_K", 70, 1280)
    tensor_product(weight, activations(17, 1280), config, activations(1, 70)[0])


@pytest.mark.skipif(EMULATED, reason="needs a Hopper card")
@pytest.mark.parametrize("rows", [5, 16, 33, 64, 100])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_copies_ahead_give_what_the_plain_kernel_gives(name: str, rows: int) -> None:
    weight = weight_of(name, 130, 2048)
    x = activations(rows, 2048).half().to(DEVICE)
    sums = torch.empty(8 * rows * 130, device=DEVICE)
    expected = poisoned(rows, 130)
    tensor_cores.tensor_rows(weight, x, expected, sums, config=(4, 64, 4, 1, 0))
    configs = tensor_cores.tensor_configs(weight, rows)
    ahead = [config for config in configs if config[-1]]
    assert ahead or torch.cuda.get_device_capability()[0] != 9
    for config in ahead:
        out = poisoned(rows, 130)
        tensor_cores.tensor_rows(weight, x, out, sums, config=config)
        # Both sum float16 weights in float32, in another order.
        assert (out - expected).norm() / expected.norm() < 1e-4
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


def test_tensor_cores_refuse_too_few_places_for_sums() -> None:
    weight = weight_of("Q4_K", 64, 512)
    with pytest.raises(ValueError, match="4 splits of 9 rows"):
        tensor_cores.tensor_rows(
            weight, poisoned(9, 512).half(), poisoned(9, 64), poisoned(1, 64)[0],
            config=(4, 64, 4, 4, 0),
        )  # fmt: skip


def test_products_that_do_not_fit_are_refused() -> None:
    weight = weight_of("Q8_0", 4, 64)
    x, _ = quantised(activations(17, 64))
    with pytest.raises(ValueError, match="1 to 16 rows"):
        products.few_rows(weight, on_device(x), poisoned(17, 4))
    x, _ = quantised(activations(2, 64))
    with pytest.raises(ValueError, match="do not fit"):
        products.few_rows(weight, on_device(x), poisoned(2, 5), out_offset=2)
    with pytest.raises(ValueError, match="gate is Q8_0"):
        products.few_rows(weight, on_device(x), poisoned(2, 4), up=weight_of("Q4_0", 4, 64))


@pytest.mark.parametrize("name", [*FORMS, "F16"])
def test_unpacking_rounds_the_exact_numbers_once(name: str) -> None:
    weight = weight_of(name, 5, width(name, 1))
    expected = unpacked(weight)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = poisoned(6, weight.columns + 8, dtype)
        unpacking.unpack_to(weight, out[:5, : weight.columns])
        written = out[:5, : weight.columns]
        if dtype == torch.bfloat16 and EMULATED:  # the interpreter cuts off instead
            assert torch.allclose(written.float(), expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(written, expected.to(dtype))
        assert int(out.isnan().sum()) == out.numel() - expected.numel()


@pytest.mark.parametrize("name", [*FORMS, "F16", "BF16"])
def test_embeddings_are_the_rows_of_tokens(name: str) -> None:
    weight = weight_of(name, 9, width(name, 2))
    tokens = torch.tensor([8, 0, 3, 3], dtype=torch.int32, device=DEVICE)
    out = poisoned(5, weight.columns + 4)
    unpacking.embedding_rows(weight, tokens, 3.7, out)
    expected = unpacked(weight)[tokens.long()] * torch.tensor(3.7, device=DEVICE)
    assert torch.equal(out[:4, : weight.columns], expected)
    assert int(out.isnan().sum()) == out.numel() - expected.numel()
