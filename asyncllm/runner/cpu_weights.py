"""A model's matrices as tiles, each once; the checkpoint's pages are given back."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from asyncllm.kernels.cpu.compiled import KernelLibrary
from asyncllm.kernels.cpu.packing import TileMemory, pack, tile_form, tiles_nbytes
from asyncllm.kernels.cpu.tiles import FLOATS

if TYPE_CHECKING:
    from asyncllm.kernels.reference import PackedWeight
    from asyncllm.model.causal_lm import CausalLM

_DONT_NEED: Final = 4  # MADV_DONTNEED


@dataclass(frozen=True, slots=True)
class Tiles:
    """A weight in tiles."""

    form: str
    data: Any  # uint8 [tiles, tile bytes]
    rows: int
    columns: int

    @property
    def quantised(self) -> bool:
        """Whether its products take int8 activations."""
        return self.form not in FLOATS


def pack_model(
    model: CausalLM,
    library: KernelLibrary,
    threads: int,
    on_tiles: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, Tiles]:
    """Every matrix of a model as tiles, by name; the checkpoint's pages are given back.

    Args:
        model: bound weights.
        library: compiles kernels or finds them compiled.
        threads: that work on it.
        on_tiles: told the bytes of each weight as its tiles are made; may raise to give up.

    Raises:
        ValueError: weights of a rare format that tiles cannot hold exactly.
    """
    weights = [model.embedding, model.head.weight]
    for layer in model.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        linears = (*attention.projections, attention.output, *feed_forward.gate_up)
        weights += [linear.weight for linear in (*linears, feed_forward.down)]
    every = {weight.name: weight for weight in weights}
    shapes = {
        name: (weight.rows, weight.columns, tile_form(weight.format.name))
        for name, weight in every.items()
    }
    memory = TileMemory(sum(tiles_nbytes(*shape) for shape in shapes.values()))
    places = {name: memory.take(*shape) for name, shape in shapes.items()}

    def tiles(weight: PackedWeight) -> Tiles:
        form, data = shapes[weight.name][2], places[weight.name]
        pack(library, weight.format, weight.data.numpy(), weight.columns, data)
        _forget(weight.data)
        return Tiles(form, data, weight.rows, weight.columns)

    done: dict[str, Tiles] = {}
    with ThreadPoolExecutor(threads, thread_name_prefix="asyncllm-packing") as pool:
        futures = {name: pool.submit(tiles, weight) for name, weight in every.items()}
        try:
            for name, future in futures.items():
                done[name] = future.result()
                on_tiles(every[name].data.nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return done


def _forget(data: Tensor) -> None:
    """Give the pages of a mapped file back: they were read once and will not be again."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    first = -(-data.data_ptr() // page) * page
    count = (data.data_ptr() + data.nbytes - first) // page * page
    if count > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(count), _DONT_NEED)
