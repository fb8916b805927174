"""Tiles: 16 rows of a weight side by side, the form in which kernels read it.

A tile holds the same bits as the checkpoint, in another order, chunk after chunk of 32 columns, so
that one vector instruction advances all 16 rows. A chunk begins with the codes. Four consecutive
columns of the 16 rows are one vector of 64 bytes (byte 4 * row + column % 4); with fewer than 8
bits, codes are cut into planes that several such vectors share:

- a nibble plane, 4 vectors: vector j has columns 4j to 4j + 3 in its low nibbles and those 16
  columns later in its high ones;
- a plane of two bits, 2 vectors: field f of vector h belongs to columns 4 * (4h + f) and on;
- a plane of one bit, 1 vector: bit j belongs to columns 4j and on.

Then come the 16 scales of each group of columns, then their minimums. Formats with super-blocks of
256 columns have the 16 super-scales (and super-minimums) in front of 8 such chunks, whose scales
are bytes; that is 3% more than the checkpoint's own packing of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

TILE_ROWS: Final = 16
CHUNK: Final = 32

IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLayout:
    """How one format's weights lie in a tile; `value = scale * (code - offset) - minimum`.

    Attributes:
        bits: of a code.
        offset: what codes are too large by.
        table: values of the codes, where these are no numbers themselves.
        group: columns with one scale, 16 or 32.
        minimum: groups have minimums; added where scales stand alone, as ggml has it, and
            subtracted in super-blocks.
        scale: scales are float16, or bytes under a float16 super-scale, or exponents of 2, or
            float32.
    """

    bits: int
    offset: int = 0
    table: tuple[int, ...] | None = None
    group: int = 32
    minimum: bool = False
    scale: Literal["float16", "super", "exponent", "float32"] = "float16"

    @property
    def block(self) -> int:
        """Columns of a whole block."""
        return 256 if self.scale == "super" else CHUNK

    @property
    def head_bytes(self) -> int:
        """Super-scales in front of a block."""
        return 32 * (1 + self.minimum) if self.scale == "super" else 0

    @property
    def codes_bytes(self) -> int:
        return TILE_ROWS * CHUNK * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Of the 16 scales of one group."""
        each = {"float16": 2, "super": 1, "exponent": 1, "float32": 4}[self.scale]
        return TILE_ROWS * each

    @property
    def chunk_bytes(self) -> int:
        groups = CHUNK // self.group
        return self.codes_bytes + groups * (1 + self.minimum) * self.scale_bytes

    @property
    def block_bytes(self) -> int:
        return self.head_bytes + self.block // CHUNK * self.chunk_bytes

    @property
    def wide(self) -> bool:
        """Whether bytes that enter products may be above 127."""
        return self.bits == 8 or self.table is not None

    def tile_bytes(self, columns: int) -> int:
        return columns // self.block * self.block_bytes


LAYOUTS: Final = {
    "Q4_0": TileLayout(bits=4, offset=8),
    "Q4_1": TileLayout(bits=4, minimum=True),
    "Q5_0": TileLayout(bits=5, offset=16),
    "Q5_1": TileLayout(bits=5, minimum=True),
    "Q8_0": TileLayout(bits=8, offset=128),
    "Q2_K": TileLayout(bits=2, group=16, minimum=True, scale="super"),
    "Q3_K": TileLayout(bits=3, offset=4, group=16, scale="super"),
    "Q4_K": TileLayout(bits=4, minimum=True, scale="super"),
    "Q5_K": TileLayout(bits=5, minimum=True, scale="super"),
    "Q6_K": TileLayout(bits=6, offset=32, group=16, scale="super"),
    "IQ4_NL": TileLayout(bits=4, table=IQ4_VALUES),
    "IQ4_XS": TileLayout(bits=4, table=IQ4_VALUES, scale="super"),
    "MXFP4": TileLayout(bits=4, table=E2M1_VALUES, scale="exponent"),
    # Integers of any other format, and the exact float32 that each 16 columns' are multiplied by.
    "INT8": TileLayout(bits=8, offset=128, group=16, scale="float32"),
}

FLOATS: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Formats whose tiles are simply transposed: of each column the 16 rows' numbers; their bytes."""


def tile_bytes(form: str, columns: int) -> int:
    """Bytes of a tile of `columns` columns in a form of `LAYOUTS` or `FLOATS`."""
    if form in FLOATS:
        return FLOATS[form] * columns * TILE_ROWS
    return LAYOUTS[form].tile_bytes(columns)
