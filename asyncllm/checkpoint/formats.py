"""The formats that tensors are stored in: their blocks, their sizes, how they become float32.

A row of a tensor is a whole number of blocks. `FORMATS` has a row for every type that the `gguf`
package can dequantise, by the number it has in a GGUF file. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Format:
    """How the weights of one tensor are stored.

    Attributes:
        name: ggml's name, as `"Q4_K"`.
        type_id: The number of the type in a GGUF file.
        block_elements: Weights in a block; the columns of a tensor are a multiple of it.
        block_bytes: Bytes of a block.
    """

    name: str
    type_id: int
    block_elements: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; ValueError where they are no whole blocks."""
        blocks, rest = divmod(columns, self.block_elements)
        if rest:
            raise ValueError(
                f"{self.name} rows are multiples of {self.block_elements} weights, not {columns}"
            )
        return blocks * self.block_bytes

    def unpack(self, raw: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the weights of `raw` into `out`, with the bits of `gguf.quants.dequantize`.

        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4 are
        unpacked in torch on the device of the tensors; the others by the `gguf` package in numpy,
        on the CPU and slowly. Temporaries are bounded: tiles of about a million weights on the
        CPU, `raw` as a whole on other devices.

        Args:
            raw: uint8 `[rows, row_bytes]`, contiguous.
            out: float32 `[rows, columns]`, contiguous, on the same device.

        Raises:
            ValueError: Shape, dtype, device or layout are not these.
        """
        from asyncllm.checkpoint import unpack

        unpack.unpack_rows(self, raw, out)


def _table(*rows: tuple[int, str, int, int]) -> Mapping[int, Format]:
    return MappingProxyType(
        {type_id: Format(name, type_id, elements, size) for type_id, name, elements, size in rows}
    )


# Sizes are held against the gguf package's table by a test.
FORMATS: Final = _table(
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
)

# Types of ggml that files may name, but that neither the gguf package nor this one can unpack.
UNSUPPORTED: Final[Mapping[int, str]] = MappingProxyType(
    {
        9: "Q8_1",
        15: "Q8_K",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        41: "Q1_0",
    }
)
