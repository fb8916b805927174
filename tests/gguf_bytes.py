"""Makes the bytes of GGUF files, sound ones and broken ones, and random blocks of each format."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncllm.checkpoint.formats import FORMATS, Format

TYPE_IDS = {
    **{"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6},
    **{"bool": 7, "string": 8, "array": 9, "uint64": 10, "int64": 11, "float64": 12},
}
LETTERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
BY_NAME = {layout.name: layout for layout in FORMATS.values()}


@dataclass(frozen=True)
class Typed:
    """A metadata value of a given GGUF type; `kind` is the elements' type where it is a list."""

    kind: str
    value: Any


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> bytes:
    """Type and value of a metadata entry; a plain str, bool, int or float has its usual type."""
    if not isinstance(value, Typed):
        kinds = {str: "string", bytes: "string", bool: "bool", int: "uint32", float: "float32"}
        value = Typed(kinds[type(value)], value)
    kind = TYPE_IDS[value.kind]
    if isinstance(value.value, list):
        head = struct.pack("<IIQ", TYPE_IDS["array"], kind, len(value.value))
        return head + b"".join(_element(kind, element) for element in value.value)
    return struct.pack("<I", kind) + _element(kind, value.value)


def _element(kind: int, value: Any) -> bytes:
    if kind == TYPE_IDS["string"]:
        return string(value)
    if kind == TYPE_IDS["array"]:
        return value_bytes(value)[4:]
    return struct.pack("<" + LETTERS[kind], value)


def entry(key: str | bytes, value: Any) -> bytes:
    """A metadata entry; `value` as bytes preceded by its type when it is a bytearray."""
    return string(key) + (bytes(value) if isinstance(value, bytearray) else value_bytes(value))


def tensor_entry(
    name: str | bytes,
    dimensions: Sequence[int],
    type_id: int = 0,
    offset: int = 0,
    *,
    count: int | None = None,
) -> bytes:
    """A tensor's entry; `dimensions` in the file's order, columns first."""
    number = len(dimensions) if count is None else count
    return (
        string(name)
        + struct.pack(f"<I{len(dimensions)}Q", number, *dimensions)
        + struct.pack("<IQ", type_id, offset)
    )


def raw_gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    tensor_count: int | None = None,
    entry_count: int | None = None,
) -> bytes:
    """A file put together from entries that may say anything."""
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment if tensors else 0) + data


def gguf(
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]] | None = None,
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A sound file; tensors are (format, shape with rows first, packed bytes)."""
    entries = [entry(key, value) for key, value in (metadata or {}).items()]
    infos, data = [], b""
    for name, (layout, shape, raw) in (tensors or {}).items():
        data += bytes(-len(data) % alignment)
        infos.append(tensor_entry(name, shape[::-1], BY_NAME[layout].type_id, len(data)))
        data += raw
    return raw_gguf(entries, infos, data, version=version, alignment=alignment)


# Where the fp16 scales of a block lie; all other bytes may have any value.
_HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,)},
    **{"IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,)},
}


def random_blocks(
    layout: Format, rows: int, columns: int, rng: np.random.Generator, scale: float = 0.02
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 `[rows, row_bytes]`: random weights under scales that are numbers of about `scale`."""
    if layout.block_elements == 1:
        values = rng.normal(0, scale, (rows, columns)).astype(np.float32)
        if layout.name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if layout.name == "F16" else np.float32).view(np.uint8)
    count = rows * columns // layout.block_elements
    blocks = rng.integers(0, 256, (count, layout.block_bytes), dtype=np.uint8)
    halves = rng.normal(0, scale, (count, 2)).astype(np.float16)
    for index, start in enumerate(_HALVES.get(layout.name, ())):
        blocks[:, start : start + 2] = halves[:, index : index + 1].view(np.uint8)
    if layout.name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 130, count)
    if layout.name == "IQ1_M":
        # The four quarters of the scale are the upper halves of the last bytes of four pairs.
        bits = halves[:, :1].view(np.uint16)
        for quarter in range(4):
            nibble = (bits[:, 0] >> 4 * quarter & 15).astype(np.uint8)
            place = 49 + 2 * quarter
            blocks[:, place] = blocks[:, place] & 15 | nibble << 4
    return blocks.reshape(rows, layout.row_bytes(columns))
