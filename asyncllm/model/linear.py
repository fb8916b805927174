"""Binding: tensors of a checkpoint taken by name, checked for shape, and accounted for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncllm.checkpoint.formats import FORMATS, Format
from asyncllm.errors import CorruptCheckpointError
from asyncllm.kernels.ops import KernelTable
from asyncllm.kernels.reference import SLAB_WEIGHTS, PackedWeight

if TYPE_CHECKING:
    from asyncllm.checkpoint.checkpoint import Checkpoint, TensorInfo

_BF16 = next(row for row in FORMATS.values() if row.name == "BF16")
_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: a packed weight, the kernel that multiplies with it, perhaps a bias."""

    weight: PackedWeight
    run: Callable[..., None]
    bias: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.weight.rows

    def __call__(self, x: Tensor, scratch: Tensor, out: Tensor) -> None:
        """`out = x @ weight.T + bias`; x float32 [rows, inputs], out float32 [rows, outputs]."""
        self.run(x, self.weight, scratch, out)
        if self.bias is not None:
            out.add_(self.bias)


class Binder:
    """Hands out a checkpoint's tensors, each checked, and knows at the end which nobody wanted.

    Args:
        checkpoint: where they are.
        kernels: chooses what multiplies with them.
        device: kind of device they are used on.
        widen: keep a bf16 copy of packed matrices and use that.
        should_stop: looked at before each tensor; what it raises ends the binding.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: KernelTable,
        *,
        device: str = "cpu",
        widen: bool = False,
        on_tensor: Callable[[TensorInfo], None] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._device = device
        self._widen = widen
        self._on_tensor = on_tensor
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def vector(self, name: str, size: int) -> Tensor:
        """A float32 copy [size] of a small tensor."""
        info = self._take(name, (size,))
        out = torch.empty(1, size)
        info.format.unpack(info.packed(), out)
        return out[0]

    def optional_vector(self, name: str, size: int) -> Tensor | None:
        return self.vector(name, size) if name in self else None

    def matrix(self, name: str, rows: int, columns: int) -> PackedWeight:
        """A matrix as it is stored, or its bf16 copy."""
        info = self._take(name, (rows, columns))
        layout, data = info.format, info.packed()
        if self._widen and layout.row_bytes(columns) < _BF16.row_bytes(columns):
            layout, data = _BF16, _widened(layout, data, columns)
        return PackedWeight(name, layout, data, rows, columns)

    def linear(self, weight: PackedWeight, bias: Tensor | None = None) -> Linear:
        run = self._kernels.choose(
            "linear",
            device=self._device,
            format=weight.format.name,
            rows=weight.rows,
            columns=weight.columns,
        )
        return Linear(weight, run, bias)

    def finish(self) -> None:
        """Check that every tensor was wanted.

        Raises:
            CorruptCheckpointError: naming those that were not.
        """
        unused = [name for name in self._checkpoint.tensors if name not in self._used]
        if unused:
            more = f" and {len(unused) - _NAMES_SHOWN} more" if len(unused) > _NAMES_SHOWN else ""
            raise CorruptCheckpointError(
                f"{self._checkpoint.path}: architecture {self._checkpoint.architecture!r} has no "
                f"use for tensors {', '.join(unused[:_NAMES_SHOWN])}{more}"
            )

    def ignore(self, name: str) -> None:
        """Count a tensor as used."""
        self._used.add(name)

    def _take(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CorruptCheckpointError(f"{self._checkpoint.path}: tensor {name!r} is missing")
        if info.shape != shape:
            raise CorruptCheckpointError(
                f"{info.source}: tensor {name!r} has shape {list(info.shape)}; "
                f"{list(shape)} is expected (rows first)"
            )
        self._used.add(name)
        if self._on_tensor is not None:
            self._on_tensor(info)
        return info


def _widened(layout: Format, data: Tensor, columns: int) -> Tensor:
    """A bf16 copy as bytes, made a slab at a time."""
    step = max(1, SLAB_WEIGHTS // columns)
    slab = torch.empty(step, columns)
    wide = torch.empty(len(data), columns, dtype=torch.bfloat16)
    for start in range(0, len(data), step):
        raw = data[start : start + step]
        layout.unpack(raw, slab[: len(raw)])
        wide[start : start + step] = slab[: len(raw)]
    return wide.view(torch.uint8)
