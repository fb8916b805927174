"""Weights on the device: the bits of the checkpoint as a structure of arrays.

A weight of a block format is cut into planes that kernels read as 32-bit words. Columns go by
sub-blocks of 32: columns 4j + b and 16 + 4j + b (j and b from 0 to 3) are the `low` and the `high`
half. What a code needs:

- `codes4` int32 [rows, columns / 8]: word j of a sub-block has the low halves' four bits in the low
  nibbles of its bytes b and the high halves' in the high nibbles;
- `codes2` int32 [rows, columns / 16]: a word for the low and one for the high half; bits 2j and
  2j + 1 of byte b are two bits of a code, the upper ones beside `codes4`;
- `codes1` int32 [rows, columns / 32]: bit j of byte b belongs to the low half, bit 4 + j to the
  high one; the uppermost bit of a code;
- `codes8` int32 [rows, columns / 4]: the words of all low halves, then those of all high halves;
  signed bytes.

`scales` has an element for each sub-block: the float16 scale, or it and the minimum as one int32;
an exponent; or, in formats with super-blocks, the bytes scale, scale of the high half if it has its
own, minimum, minimum of the high half. `supers` then has the float16 super-scale of each 256
columns, or it and the super-minimum as one int32. Floats are one plane, `values`.

The layouts of the checkpoint's blocks are those of `ggml-common.h`. This module needs no triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from asyncllm.kernels.cpu.tiles import LAYOUTS, TileLayout

if TYPE_CHECKING:
    from asyncllm.checkpoint.formats import Format

FLOATS: Final[Mapping[str, torch.dtype]] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

# Weights repacked at a time, and bytes sent at a time: bound the temporaries.
_SLAB_WEIGHTS: Final = 1 << 24
_STAGING_BYTES: Final = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeight:
    """A matrix in the form that kernels read.

    Attributes:
        form: a format of `asyncllm.kernels.cpu.tiles.LAYOUTS`, or `"F32"`, `"F16"`, `"BF16"`.
        rows: outputs of a linear layer.
        columns: its inputs, a multiple of 32 unless the form is a float.
        planes: contiguous tensors by name, as the module describes.
    """

    form: str
    rows: int
    columns: int
    planes: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(plane.nbytes for plane in self.planes.values())

    @property
    def layout(self) -> TileLayout | None:
        """How values come from codes; None for floats."""
        return None if self.form in FLOATS else LAYOUTS[self.form]

    def slice(self, start: int, stop: int) -> DeviceWeight:
        """Some rows, not copied."""
        planes = {name: plane[start:stop] for name, plane in self.planes.items()}
        return DeviceWeight(self.form, stop - start, self.columns, planes)


class Staging:
    """Pinned memory that bytes go to a device through, two buffers in turn.

    Args:
        device: where to; for the CPU nothing is allocated and nothing copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0
        if device.type == "cuda":
            self._buffers = [
                (
                    torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True),
                    torch.cuda.Event(),
                )
                for _ in range(2)
            ]

    def send(self, raw: Tensor) -> Tensor:
        """`raw`, uint8 of at most 32 MiB, on the device."""
        if not self._buffers:
            return raw.to(self._device)
        buffer, sent = self._buffers[self._turn]
        self._turn = 1 - self._turn
        sent.synchronize()
        pinned = buffer[: raw.numel()].view(raw.shape)
        pinned.copy_(raw)
        there = pinned.to(self._device, non_blocking=True)
        sent.record()
        return there


def upload(
    layout: Format,
    raw: Tensor,
    columns: int,
    device: torch.device,
    staging: Staging | None = None,
) -> DeviceWeight:
    """Bring a weight to the device, repacked there.

    Formats without planes of their own become float16, or bfloat16 where a weight is beyond the
    range of float16.

    Args:
        layout: how the checkpoint stores it.
        raw: uint8 [rows, row bytes], on the CPU; may be a view of a mapped file.
        columns: of the weight.
        device: where it is to be.
        staging: to be used again from weight to weight; made when None.

    Raises:
        ValueError: `raw` is not this.
    """
    if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] != layout.row_bytes(columns):
        raise ValueError(
            f"a {layout.name} weight of {columns} columns has uint8 rows of "
            f"{layout.row_bytes(columns)} bytes, not {raw.dtype} {list(raw.shape)}"
        )
    staging = staging or Staging(device)
    step = max(1, min(_SLAB_WEIGHTS // columns, _STAGING_BYTES // raw.shape[1]))
    slabs = [(start, raw[start : start + step]) for start in range(0, len(raw), step)]
    if layout.name in LAYOUTS or layout.name in FLOATS:
        planes: dict[str, Tensor] = {}
        for start, slab in slabs:
            for name, part in _planes(layout, staging.send(slab), columns).items():
                if name not in planes:
                    planes[name] = part.new_empty(len(raw), part.shape[1])
                planes[name][start : start + len(part)] = part
        return DeviceWeight(layout.name, len(raw), columns, planes)
    return _dense(layout, slabs, columns, len(raw), device)


def joined(weights: Sequence[DeviceWeight]) -> DeviceWeight:
    """The rows of several weights of one form and width as one weight, copied."""
    first = weights[0]
    if any((w.form, w.columns) != (first.form, first.columns) for w in weights):
        raise ValueError(f"weights to join differ: {[(w.form, w.columns) for w in weights]}")
    planes = {name: torch.cat([w.planes[name] for w in weights]) for name in first.planes}
    return DeviceWeight(first.form, sum(w.rows for w in weights), first.columns, planes)


def unpacked(weight: DeviceWeight) -> Tensor:
    """float32 [rows, columns], with the bits of `Format.unpack`; slow and plain, for tests."""
    layout, planes = weight.layout, weight.planes
    if layout is None:
        return planes["values"].float()
    shape = (weight.rows, weight.columns // 32, 2, 16)
    codes = _joined_codes(planes, shape)
    if layout.table is not None:
        values = torch.tensor(layout.table, device=codes.device)[codes].float()
    else:
        values = codes.float() - (layout.offset if layout.bits < 8 else 0)
    scales = planes["scales"]
    if layout.scale == "float16":
        fields = scales.view(torch.float16).view(*shape[:2], -1).float()
        values *= fields[..., 0, None, None]
        if layout.minimum:
            values += fields[..., 1, None, None]
    elif layout.scale == "exponent":
        power = scales.int()
        bits = torch.where(power < 2, 0x00200000 << power, (power - 1) << 23)
        values *= bits.view(torch.float32)[..., None, None]
    else:
        groups = 32 // layout.group
        kind = torch.uint8 if layout.minimum else torch.int8
        small = scales.view(kind).view(*shape[:2], -1).float()
        supers = planes["supers"].view(torch.float16).view(weight.rows, -1, 1, 1 + layout.minimum)
        wide = supers.float().expand(-1, -1, 8, -1).reshape(*shape[:2], -1)
        values *= (wide[..., :1] * small[..., :groups])[..., None]
        if layout.minimum:
            values -= (wide[..., 1:] * small[..., groups:])[..., None]
    return values.reshape(weight.rows, weight.columns)


def _joined_codes(planes: Mapping[str, Tensor], shape: tuple[int, int, int, int]) -> Tensor:
    """int64 [rows, sub-blocks, 2, 16], signed in case of `codes8`."""
    rows, subs = shape[:2]
    if "codes8" in planes:
        halves = planes["codes8"].view(torch.int8).view(rows, 2, subs, 16)
        return halves.transpose(1, 2).long()
    codes, place = torch.zeros(shape, dtype=torch.int64, device=planes["scales"].device), 0
    if "codes4" in planes:
        packed = planes["codes4"].view(torch.uint8).view(rows, subs, 16).long()
        codes += torch.stack((packed & 15, packed >> 4), dim=2)
        place = 4
    for name, bits in (("codes2", 2), ("codes1", 1)):
        if name in planes:
            packed = planes[name].view(torch.uint8).view(rows, subs, -1, 1, 4).long()
            fields = torch.arange(0, 8, bits, device=packed.device).view(-1, 1)
            found = (packed >> fields) & ((1 << bits) - 1)
            codes += found.reshape(shape) << place
            place += bits
    return codes


def _dense(
    layout: Format,
    slabs: list[tuple[int, Tensor]],
    columns: int,
    rows: int,
    device: torch.device,
) -> DeviceWeight:
    parts, form = [], "F16"
    for _, slab in slabs:
        wide = torch.empty(len(slab), columns)
        layout.unpack(slab.contiguous(), wide)
        if wide.abs().max() > torch.finfo(torch.float16).max:
            form = "BF16"
        parts.append(wide)
    values = torch.empty(rows, columns, dtype=FLOATS[form], device=device)
    for (start, _), part in zip(slabs, parts, strict=True):
        values[start : start + len(part)] = part.to(FLOATS[form]).to(device)
    return DeviceWeight(form, rows, columns, {"values": values})


# From a checkpoint's blocks, uint8 [n, block bytes], to codes, uint8 [n, block elements].


def _halves(packed: Tensor) -> Tensor:
    """Of every 16 bytes the low four bits, then the high ones."""
    packed = packed.reshape(len(packed), -1, 1, 16)
    return torch.cat((packed & 15, packed >> 4), dim=2).view(len(packed), -1)


def _four(at: int) -> Callable[[Tensor], Tensor]:
    return lambda blocks: _halves(blocks[:, at : at + 16])


def _bits(packed: Tensor) -> Tensor:
    """[n, k] to the bits [n, 8 k], lowest first."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(2) >> places) & 1).view(len(packed), -1)


def _five(high: int) -> Callable[[Tensor], Tensor]:
    def codes(blocks: Tensor) -> Tensor:
        fifth = _bits(blocks[:, high : high + 4])
        return _halves(blocks[:, high + 4 : high + 20]) | fifth << 4

    return codes


def _fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """Of every `run` bytes the lowest `bits` bits, then the next."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> places) & ((1 << bits) - 1)).view(len(packed), -1)


def _q3_k(blocks: Tensor) -> Tensor:
    return _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2


def _q5_k(blocks: Tensor) -> Tensor:
    return _fields(blocks[:, 48:176], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4


def _q6_k(blocks: Tensor) -> Tensor:
    return _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4


_CODES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q4_0": _four(2),
    "Q4_1": _four(4),
    "Q5_0": _five(2),
    "Q5_1": _five(4),
    "Q8_0": lambda blocks: blocks[:, 2:],
    "Q2_K": lambda blocks: _fields(blocks[:, 16:80], 2, 32),
    "Q3_K": _q3_k,
    "Q4_K": lambda blocks: _fields(blocks[:, 16:144], 4, 32),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _four(2),
    "IQ4_XS": lambda blocks: _halves(blocks[:, 8:136]),
    "MXFP4": _four(1),
}


# And to scales, the bytes of each sub-block, and super-scales, the bytes of each block.


def _q2_k_scales(blocks: Tensor) -> Tensor:
    pairs = blocks[:, :16].reshape(len(blocks), 8, 2)
    return torch.cat((pairs & 15, pairs >> 4), dim=2)


def _q3_k_scales(blocks: Tensor) -> Tensor:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    return (low | high << 4) - 32


def _q4_k_scales(blocks: Tensor) -> Tensor:
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return torch.stack((scales, least), dim=2)


def _iq4_xs_scales(blocks: Tensor) -> Tensor:
    low, high = _fields(blocks[:, 4:8], 4, 1), _fields(blocks[:, 2:4], 2, 1)
    return (low | high << 4) - 32


_SUPERS: Final[Mapping[str, tuple[Callable[[Tensor], Tensor], int, torch.dtype]]] = {
    # The scales, at which byte the super-scales begin, and what a sub-block's scales are one of.
    "Q2_K": (_q2_k_scales, 80, torch.int32),
    "Q3_K": (_q3_k_scales, 108, torch.int16),
    "Q4_K": (_q4_k_scales, 0, torch.int16),
    "Q5_K": (_q4_k_scales, 0, torch.int16),
    "Q6_K": (lambda blocks: blocks[:, 192:208], 208, torch.int16),
    "IQ4_XS": (_iq4_xs_scales, 0, torch.int8),
}


def _planes(layout: Format, raw: Tensor, columns: int) -> dict[str, Tensor]:
    """The planes of some rows, each [rows, elements]."""
    rows, name = len(raw), layout.name
    if name in FLOATS:
        return {"values": raw.contiguous().view(FLOATS[name])}
    form = LAYOUTS[name]
    blocks = raw.reshape(-1, layout.block_bytes)
    halves = _CODES[name](blocks).reshape(rows, -1, 2, 16)
    planes = _code_planes(halves, form.bits)
    pair = torch.int32 if form.minimum else torch.float16
    if form.scale == "super":
        scales_of, at, kind = _SUPERS[name]
        planes["scales"] = _words(scales_of(blocks), rows, kind)
        planes["supers"] = _words(blocks[:, at : at + pair.itemsize], rows, pair)
    else:
        kind = torch.uint8 if form.scale == "exponent" else pair
        planes["scales"] = _words(blocks[:, : kind.itemsize], rows, kind)
    return planes


def _words(data: Tensor, rows: int, kind: torch.dtype) -> Tensor:
    return data.reshape(rows, -1).contiguous().view(kind)


def _code_planes(halves: Tensor, bits: int) -> dict[str, Tensor]:
    """Of codes uint8 [rows, sub-blocks, 2, 16]."""
    rows, planes, place = len(halves), {}, 0
    if bits == 8:
        return {"codes8": _words(halves.transpose(1, 2), rows, torch.int32)}
    if bits >= 4:
        nibbles = halves[:, :, 0] & 15 | halves[:, :, 1] << 4
        planes["codes4"] = _words(nibbles, rows, torch.int32)
        place = 4
    if bits - place >= 2:
        found = (halves >> place & 3).view(rows, -1, 2, 4, 4)
        planes["codes2"] = _words(_packed(found, 2), rows, torch.int32)
        place += 2
    if bits > place:
        found = (halves >> place & 1).view(rows, -1, 8, 4)
        planes["codes1"] = _words(_packed(found, 1), rows, torch.int32)
    return planes


def _packed(found: Tensor, bits: int) -> Tensor:
    """The fields of each byte, [..., fields, 4] to [..., 4]."""
    packed = found[..., 0, :].clone()
    for field in range(1, found.shape[-2]):
        packed |= found[..., field, :] << (bits * field)
    return packed
