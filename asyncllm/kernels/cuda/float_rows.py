"""The product of weights in floats that is the same, to the bit, for any number of rows.

A program owns 64 rows of the weight and goes along their columns with tensor cores, for 32 rows of
activations, whether there are as many or not; how the columns are shared out is a matter of the
weight's shape. So a row's sums are made in one order whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cuda.rows import to_half
from asyncllm.kernels.cuda.spelling import EMULATED, await_inputs, depend
from asyncllm.kernels.cuda.tensor_cores import add_splits
from asyncllm.kernels.cuda.weights import DeviceWeight

_OWNED: Final = 64
_ROWS: Final = 32
_STEP_BYTES: Final = 128  # of a row of the weight


@triton.jit
def _float_rows(
    values, x, bias, out, N, M, x_stride, out_stride, split_stride,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr, EMU: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight by BM rows of activations, over one of SPLITS parts of the columns."""
    STEPS: tl.constexpr = (K + BK - 1) // BK
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    depend(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    # Rows beyond the last are the last one again, and not stored.
    line = values + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    x_line = x + m.to(tl.int64)[None, :] * x_stride
    used = (m < M)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    await_inputs(PDL)
    for number in range(EACH):
        k = (tl.program_id(2) * EACH + number) * BK + tl.arange(0, BK)
        weights = tl.load(line + k[None, :], mask=(k < K)[None, :], other=0.0)
        xs = tl.load(x_line + k[:, None], mask=used & (k < K)[:, None], other=0.0)
        if EMU:
            # The interpreter multiplies bfloat16 as if it were whole numbers.
            acc = tl.dot(weights.to(tl.float32), to_half(xs, values).to(tl.float32), acc)
        else:
            acc = tl.dot(weights, to_half(xs, values), acc)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0)[:, None]
    target = out + tl.program_id(2).to(tl.int64) * split_stride
    target += m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(target, acc, mask=(n < N)[:, None] & (m < M)[None, :])


def _splits(weight: DeviceWeight) -> int:
    """Programs that share the columns of a row."""
    programs = triton.cdiv(weight.rows, _OWNED)
    steps = triton.cdiv(weight.columns * weight.planes["values"].element_size(), _STEP_BYTES)
    splits = 1
    while splits < 8 and programs * splits <= 200 and steps >= 8 * splits:
        splits *= 2
    return splits


def float_partial_sums(weights: Sequence[DeviceWeight], rows: int) -> int:
    """Elements that `float_rows` needs beside its result for any of the weights."""
    floats = [weight for weight in weights if weight.layout is None]
    shared = [(weight, _splits(weight)) for weight in floats]
    found = [splits * rows * weight.rows for weight, splits in shared if splits > 1]
    return max(found, default=0)


def float_rows(
    weight: DeviceWeight,
    x: Tensor,
    out: Tensor,
    partial: Tensor,
    *,
    bias: Tensor | None = None,
    out_offset: int = 0,
    pdl: bool = False,
) -> None:
    """`out = x @ weight.T` on tensor cores, activations rounded to what the weight is made of.

    Args:
        weight: [outputs, columns], of floats; those of float32 are rounded to TF32, as `x` then is.
        x: float32 [rows, columns].
        out: float32 [rows, at least out_offset + outputs]; written from column out_offset on.
        partial: float32, flat, of `float_partial_sums`.
        bias: float32 [outputs], added.
        out_offset: see `out`.
        pdl: as in `few_rows`.

    Raises:
        ValueError: the shapes do not fit.
    """
    rows, columns = x.shape
    if columns != weight.columns or out.shape[1] < out_offset + weight.rows or len(out) < rows:
        raise ValueError(
            f"{list(x.shape)} by [{weight.rows}, {weight.columns}] does not go into "
            f"{list(out.shape)}"
        )
    splits = _splits(weight)
    if splits > 1 and partial.numel() < splits * rows * weight.rows:
        raise ValueError(f"{splits} splits of {rows} rows: {partial.numel()} partial sums")
    values, alone = weight.planes["values"], splits == 1
    target = out[:rows, out_offset : out_offset + weight.rows]
    some_bias = target if bias is None else bias
    launch: dict[str, Any] = {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})
    _float_rows[(triton.cdiv(weight.rows, _OWNED), triton.cdiv(rows, _ROWS), splits)](
        *(values, x, some_bias, target if alone else partial, weight.rows, rows, x.stride(0)),
        *(out.stride(0) if alone else weight.rows, rows * weight.rows),
        K=columns,
        BN=_OWNED,
        BM=_ROWS,
        BK=_STEP_BYTES // values.element_size(),
        SPLITS=splits,
        BIAS=alone and bias is not None,
        EMU=EMULATED,
        num_warps=4,
        num_stages=4,
        **launch,
    )
    if not alone:
        add_splits[(triton.cdiv(weight.rows, 512), rows)](
            *(partial, some_bias, target, weight.rows, rows, out.stride(0)),
            SPLITS=splits,
            BLOCK=512,
            BIAS=bias is not None,
            num_warps=4,
            **launch,
        )
