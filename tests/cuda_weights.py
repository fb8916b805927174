"""Weights and activations for tests of the kernels for GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.checkpoint.formats import FORMATS, Format

BY_NAME = {layout.name: layout for layout in FORMATS.values()}

# Where blocks have float16 scales, which random bytes would make infinite.
_SCALES_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def random_rows(layout: Format, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A weight of any format as a checkpoint has it, uint8 [rows, row bytes]."""
    generator = torch.Generator().manual_seed(seed)
    floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if layout.name in floats:
        values = torch.randn(rows, columns, generator=generator)
        return values.to(floats[layout.name]).view(torch.uint8)
    size = (rows * columns // layout.block_elements, layout.block_bytes)
    blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    for at in _SCALES_AT.get(layout.name, ()):
        scales = torch.rand(len(blocks), 1, generator=generator) * 0.01 + 0.001
        blocks[:, at : at + 2] = scales.half().view(torch.uint8)
    if layout.name == "MXFP4":
        blocks[:, 0] = torch.randint(115, 125, (len(blocks),), generator=generator).byte()
    return blocks.view(rows, -1)


def quantised(x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Rows as the products take them, and the float64 that they mean."""
    rows, columns = x.shape
    blocks = x.view(rows, -1, 32)
    scales = blocks.abs().amax(-1) / 127
    integers = torch.round(blocks / scales[..., None]).to(torch.int8)
    halves = integers.view(rows, -1, 2, 16)
    words = halves.transpose(1, 2).contiguous().view(torch.int32).view(rows, 2, columns // 8)
    sums = halves.int().sum(-1).to(torch.int16).contiguous().view(torch.int32).view(rows, -1)
    exact = (integers.double() * scales.double()[..., None]).view(rows, columns)
    return (words, scales, sums), exact
