"""The records that kernels read: one of the step, one of each kernel's own parameters.

Both are arrays of 64-bit words at fixed addresses, written by `runner/cpu_step.py`. A parameter
that is a float has its bits in the low half of a word.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, Final

# Of the step. From RULES on there are two words for each rule by which work is cut into units: how
# many units, and how much a unit holds (tiles, rows, heads: the kernel knows).
ROWS: Final = 0
CHOSEN: Final = 1  # rows whose logits are made
ROW_BLOCK: Final = 2  # rows of a product's unit at most
TURN: Final = 3  # steps so far; what goes in and out has two places, for odd and even ones
RULES: Final = 4

WORD: Final = 8


def _record(*fields: str) -> Any:
    """The byte offset of each field, as a named tuple, which is a constant to numba."""
    return namedtuple("Record", fields)(*range(0, WORD * len(fields), WORD))


PRODUCT: Final = _record(
    *("tiles", "tile_bytes", "count", "x", "x_stride", "columns", "out", "out_stride"),
    *("bias", "rule", "rows"),
)
GATED: Final = _record(
    *("gate_kernel", "gate", "up_kernel", "up", "out", "up_out", "stride"),
    *("quantised", "quantised_stride", "columns", "count", "rule"),
)
ARRIVAL: Final = _record(
    *("new_tokens", "new_positions", "new_stride", "results", "results_stride"),
    *("tokens", "positions", "rule"),
)
NORM: Final = _record(
    *("x", "x_stride", "added", "added_stride", "post_weight", "weight", "columns", "eps"),
    *("out", "out_stride", "quantised", "quantised_stride", "chosen", "rows", "rule"),
)
HEADS: Final = _record(
    *("qkv", "stride", "heads", "kv_heads", "head_dim", "rotary_half", "q_norm", "k_norm", "eps"),
    *("query_scale", "angles", "angles_stride", "keys", "values", "tables", "table_stride"),
    *("block_tokens", "positions", "slots", "rule"),
)
ATTENTION: Final = _record(
    *("qkv", "stride", "heads", "kv_heads", "head_dim", "softcap", "window", "keys", "values"),
    *("tables", "table_stride", "block_tokens", "positions", "slots", "tiles"),
    *("out", "out_stride", "quantised", "quantised_stride", "scratch", "scratch_stride"),
    *("score_stride", "rule"),
)
EMBEDDING: Final = _record(
    *("tiles", "tile_bytes", "columns", "tokens", "scale", "out", "out_stride", "rule"),
)
ANGLES: Final = _record("positions", "frequencies", "scale", "half", "out", "stride", "rule")
CHOICE: Final = _record(
    *("logits", "stride", "padded", "count", "softcap", "draws", "draws_stride"),
    *("tokens", "tokens_stride", "peaks", "peaks_stride", "scratch", "scratch_stride", "rule"),
)
QUANTISE: Final = _record("x", "x_stride", "columns", "out", "out_stride", "rule")
