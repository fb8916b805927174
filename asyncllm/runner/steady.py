"""`SteadyProgram`: a step on a device in which a row's bits do not depend on the rows beside it.

Every product is made by one kernel in one configuration, for any number of rows, and so is the
attention of every row, prompt chunks' rows too: a row goes through the same sums alone, in a batch,
and in a chunk of any size. What is left of speed is for few rows less than `CudaProgram` has, and
for prompts much less: a weight is unpacked again for every `AS_ROWS` rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from asyncllm.kernels.cuda import attention, rows
from asyncllm.kernels.cuda.float_rows import float_partial_sums, float_rows
from asyncllm.kernels.cuda.tensor_cores import most_partial_sums
from asyncllm.kernels.cuda.weights import DeviceWeight
from asyncllm.runner.cuda_step import CudaProgram, Rows
from asyncllm.runner.device_model import DeviceLayer, Products

# Rows that every product is cut for.
AS_ROWS: Final = 32

# Sequences that attention is cut for: a row's keys are shared out as among so many.
AS_BATCH: Final = 4

# Rows of a pass at most, unless more decode at once; a longer chunk takes several. It bounds the
# memory that is needed besides.
PASS_ROWS: Final = 256


class SteadyRows(Rows):
    """One activation in the two forms that steady products take, for any number of rows."""

    __slots__ = ()

    @classmethod
    def of(cls, count: int, width: int, device: torch.device) -> SteadyRows:
        none = torch.zeros(0, device=device)
        return cls(
            (none, none, none),
            torch.zeros(count, width, dtype=torch.float16, device=device),
            none,
            torch.zeros(count, width, device=device),
            none,
        )

    def targets(self, count: int, weights: Sequence[DeviceWeight]) -> dict[str, Any]:
        """Which forms a kernel is to write for so many rows that these weights read."""
        floats = [weight.layout is None for weight in weights]
        wanted: dict[str, Any] = {}
        if not all(floats):
            wanted |= {"half": self.tensor[:count], "ordered": True}
        if any(floats):
            wanted["out"] = self.full[:count]
        return wanted


class SteadyProgram(CudaProgram):
    """As `CudaProgram`, with one arithmetic for every number of rows."""

    _as_rows = AS_ROWS
    _heads_together = 1

    def reach(self, position: int) -> int:
        """The context: how keys are shared out depends on nothing."""
        return self.context

    def chunks(
        self, slots: Tensor, positions: Tensor, fresh: Tensor, spans: Tensor, longest: int
    ) -> None:
        """As that of `CudaProgram`; rows of a sequence are in the order of their positions."""
        whole, most = self._x, len(self._y)
        for start in range(0, len(slots), most):
            some = slice(start, start + most)
            self._x = [x[some] for x in whole]
            self._pass(slots[some], positions[some], fresh[some])
        self._x = whole

    def _pass(self, slots: Tensor, positions: Tensor, fresh: Tensor) -> None:
        count = len(slots)
        self._embed(fresh, slots, count)
        attend = self._attend_rows(slots, positions, self._steady_scratch, siblings=True)
        self._layers(count, slots, positions, attend)

    # How.

    def _make_room(self, count: int) -> None:
        count = min(count, max(PASS_ROWS, self.max_batch))
        super()._make_room(count)
        splits = attention.decode_splits(AS_BATCH, self.config.kv_heads, self.context)
        self._steady_scratch = self._new_scratch(count, splits)

    def _rows(self, count: int, width: int) -> Rows:
        return SteadyRows.of(count, width, self.device)

    def _make_products_room(self, count: int) -> None:
        weights = self._weights.widest
        self._gate_up = self._zeros(count, 2 * self.config.feed_forward)
        packed = most_partial_sums(weights, count, as_rows=AS_ROWS)
        self._partial = self._zeros(max(packed, float_partial_sums(weights, count)))

    def _scratch(self, count: int, reach: int) -> attention.DecodeScratch:
        return self._steady_scratch

    def _gate(self, layer: DeviceLayer, count: int) -> None:
        self._multiply(layer.gate_up, self._normed, count, self._gate_up)
        targets = self._gated.targets(count, layer.down.weights)
        activation = self.config.architecture.activation
        rows.gate(self._gate_up[:count], activation, pdl=self.pdl, **targets)

    def _multiply(
        self, products: Products, x: Rows, count: int, out: Tensor, *, residual: bool = False
    ) -> None:
        """All parts of a matrix, side by side; nothing is ever added here."""
        out, column = out[:count], 0
        for product in products.parts:
            weight = product.weight
            if weight.layout is not None:
                self._tensor_rows(product, x.tensor[:count], out, column)
            else:
                how: dict[str, Any] = {"bias": product.bias, "out_offset": column}
                float_rows(weight, x.full[:count], out, self._partial, pdl=self.pdl, **how)
            column += weight.rows
