"""`DeviceModel`: a model's weights on a device, those that read the same input side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from asyncllm.kernels.cuda.unpacking import unpack_to
from asyncllm.kernels.cuda.weights import DeviceWeight, Staging, joined, upload

if TYPE_CHECKING:
    from asyncllm.model.attention import Attention
    from asyncllm.model.causal_lm import CausalLM, Layer
    from asyncllm.model.feed_forward import FeedForward
    from asyncllm.model.linear import Linear

HALF: Final = torch.bfloat16  # of what dense products take: its range is float32's


class DeviceModel:
    """A model's weights on a device.

    Args:
        model: bound; its matrices are not needed afterwards.
        device: where to.
        on_weight: told the bytes of each weight as it arrives; may raise to give up.
    """

    def __init__(
        self,
        model: CausalLM,
        device: torch.device,
        on_weight: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._device, self._staging, self._on_weight = device, Staging(device), on_weight
        self.embedding = self._weight(model.embedding)
        tied = model.head.weight.name == model.embedding.name
        self.head = self.embedding if tied else self._weight(model.head.weight)
        self.layers = [self._layer(layer) for layer in model.layers]
        self.output_norm = self.vector(model.output_norm)
        self._staging = Staging(torch.device("cpu"))

    def vector(self, tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.float().to(self._device).contiguous()

    def _weight(self, weight: Any) -> DeviceWeight:
        found = upload(weight.format, weight.data, weight.columns, self._device, self._staging)
        self._on_weight(weight.data.nbytes)
        return found

    def _layer(self, layer: Layer) -> DeviceLayer:
        return DeviceLayer(self, layer.attention, layer.feed_forward, layer.rope)

    def products(self, linears: Sequence[Linear]) -> Products:
        """Layers that read the same input, neighbours joined where they are of one form."""
        weights = [self._weight(linear.weight) for linear in linears]
        biases = [self.vector(linear.bias) for linear in linears]
        found: list[Product] = []
        for weight, bias in zip(weights, biases, strict=True):
            last = found[-1] if found else None
            if last and last.bias is None and bias is None and last.weight.form == weight.form:
                last.weight = joined([last.weight, weight])
            else:
                found.append(Product(weight, bias))
        return Products(found)

    def keep_dense(self) -> None:
        """Keep a 16-bit copy of every matrix for passes of many rows."""
        for layer in self.layers:
            for products in layer.every:
                if products.dense is None:
                    products.dense = products.unpacked(
                        torch.empty(products.elements, dtype=HALF, device=self._device)
                    )

    @property
    def dense_bytes(self) -> int:
        """What `keep_dense` takes."""
        every = (products for layer in self.layers for products in layer.every)
        return sum(2 * products.elements for products in every if products.dense is None)

    @property
    def largest(self) -> int:
        """Elements of the largest matrix that has no 16-bit copy."""
        every = (products for layer in self.layers for products in layer.every)
        return max((each.elements for each in every if each.dense is None), default=0)

    @property
    def widest(self) -> list[DeviceWeight]:
        """All matrices of layers, and the head's."""
        every = [products for layer in self.layers for products in layer.every]
        return [*(product.weight for each in every for product in each.parts), self.head]


@dataclass(slots=True)
class Product:
    """A matrix, and what is added to its results."""

    weight: DeviceWeight
    bias: Tensor | None


@dataclass(slots=True)
class Products:
    """Matrices that read the same input; `dense` is all of them as one, where that is kept."""

    parts: list[Product]
    dense: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.parts) == 1:
            values = self.parts[0].weight.planes.get("values")
            if values is not None and values.dtype == HALF:
                self.dense = values

    @property
    def weights(self) -> list[DeviceWeight]:
        return [product.weight for product in self.parts]

    @property
    def are_a_pair(self) -> bool:
        """Whether they are two packed ones of different forms, which one launch can multiply."""
        return len(self.parts) == 2 and all(
            part.bias is None and part.weight.layout is not None for part in self.parts
        )

    @property
    def elements(self) -> int:
        return sum(weight.rows * weight.columns for weight in self.weights)

    def unpacked(self, buffer: Tensor) -> Tensor:
        """All of it in 16 bits, written into a flat buffer."""
        columns, start = self.parts[0].weight.columns, 0
        matrix = buffer[: self.elements].view(-1, columns)
        for weight in self.weights:
            unpack_to(weight, matrix[start : start + weight.rows])
            start += weight.rows
        return matrix


class DeviceLayer:
    """One layer's weights on the device."""

    def __init__(
        self, model: DeviceModel, block: Attention, feed_forward: FeedForward, rope: int
    ) -> None:
        self.rope = rope
        self.norm = model.vector(block.norm)
        self.qkv = model.products(block.projections)
        self.q_norm, self.k_norm = model.vector(block.q_norm), model.vector(block.k_norm)
        self.output = model.products([block.output])
        self.post_norm = model.vector(block.post_norm)
        self.ff_norm = model.vector(feed_forward.norm)
        self.gate_up = model.products(feed_forward.gate_up)
        self.down = model.products([feed_forward.down])
        self.ff_post_norm = model.vector(feed_forward.post_norm)

    @property
    def every(self) -> list[Products]:
        return [self.qkv, self.output, self.gate_up, self.down]
