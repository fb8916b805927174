"""Times the products of the GPU backend against what the card can read, shape by shape.

    python -m scripts.gpu_products [--small] [--rows 1,2,4] [--quick]

Every time is that of a CUDA graph of many launches over several copies of a weight, larger together
than the cache, divided by their number; with and without programmatic dependent launch, each
configuration on offer. `--small` rehearses it all on small weights, under TRITON_INTERPRET=1 too,
where the times mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.formats import FORMATS
from asyncllm.kernels.cuda import products, spelling, unpacking
from asyncllm.kernels.cuda.weights import DeviceWeight, upload

# The 8B model's: outputs, inputs.
SHAPES = {
    "q,k,v": (6144, 4096),
    "o": (4096, 4096),
    "gate,up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
SMALL = {"square": (4, 512), "long": (4, 1280)}
CUDA = not spelling.EMULATED
DEVICE = torch.device("cuda" if CUDA else "cpu")
BY_NAME = {layout.name: layout for layout in FORMATS.values()}


def random_weight(name: str, rows: int, columns: int) -> DeviceWeight:
    """Random codes and scales that are numbers; a few rows, repeated."""
    layout = BY_NAME[name]
    generator = torch.Generator().manual_seed(rows + columns)
    size = (64 * columns // layout.block_elements, layout.block_bytes)
    blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    for at in {"Q6_K": (208,), "Q8_0": (0,)}.get(name, (0, 2)):
        scales = (torch.rand(len(blocks), 1, generator=generator) + 0.5) * 1e-4
        blocks[:, at : at + 2] = scales.half().view(torch.uint8)
    raw = blocks.view(64, -1).repeat(-(-rows // 64), 1)[:rows]
    return upload(layout, raw, columns, DEVICE)


def copies(weight: DeviceWeight) -> list[DeviceWeight]:
    """As many as no cache holds."""
    count = max(2, -(-200_000_000 // weight.nbytes)) if CUDA and weight.nbytes < 200_000_000 else 1
    return [weight] + [
        DeviceWeight(
            weight.form,
            weight.rows,
            weight.columns,
            {name: plane.clone() for name, plane in weight.planes.items()},
        )
        for _ in range(count - 1)
    ]


def microseconds(launches: list[Callable[[], Any]], repeats: int = 4) -> float:
    """Of one launch, in a graph of all of them `repeats` times; the median of 5 replays."""
    for launch in launches:
        launch()
    if not CUDA:
        start = time.perf_counter()
        launches[0]()
        return (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for launch in launches:
                launch()
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(7):
        first, last = (event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e3 / (repeats * len(launches)))
    return sorted(times[2:])[2]


def quantised(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    words = torch.randint(-(2**31), 2**31 - 1, (rows, 2, columns // 8), dtype=torch.int32)
    scales = torch.full((rows, columns // 32), 0.01)
    sums = torch.zeros(rows, columns // 32, dtype=torch.int32)
    return words.to(DEVICE), scales.to(DEVICE), sums.to(DEVICE)


def best(
    attempt: Callable[[Any, bool], list[Callable[[], None]]], configs: list[Any], pdl: bool
) -> tuple[float, Any, str]:
    """The fastest configuration; what failed is named."""
    found: tuple[float, Any] = (float("inf"), None)
    failed = ""
    for config in configs:
        try:
            found = min(found, (microseconds(attempt(config, pdl)), config))
        except Exception as error:
            failed = f"{config}: {type(error).__name__} {str(error)[:60]!r}"
    return (*found, failed)


def read_ceiling(small: bool) -> float:
    """TB/s of adding up several GB."""
    values = torch.ones(1 << (20 if small else 30), dtype=torch.float32, device=DEVICE)
    out = torch.zeros((), device=DEVICE)
    return values.nbytes / microseconds([lambda: torch.sum(values, dim=0, out=out)], 2) / 1e6


def measure(name: str, label: str, weight: DeviceWeight, counts: list[int], quick: bool) -> None:
    several = copies(weight)
    for rows in counts:
        out = torch.empty(rows, weight.rows, device=DEVICE)
        kinds: list[tuple[str, Any, list[Any]]] = []
        if rows <= products.MOST_ROWS:
            x = quantised(rows, weight.columns)

            def few(config: Any, pdl: bool, x: Any = x, out: Tensor = out) -> Any:
                return [
                    lambda w=w: products.few_rows(w, x, out, config=config, pdl=pdl)
                    for w in several
                ]

            listed: list[Any] = [*products.configs(weight, rows)]
            kinds.append(
                ("dp4a", few, [products.default_config(weight, rows)] if quick else listed)
            )
        for kind, attempt, configs in kinds:
            for pdl in (False, True) if CUDA else (False,):
                time_, config, failed = best(attempt, configs, pdl)
                print(
                    f"{name:5} {label:8} {weight.rows:6} x {weight.columns:5} rows {rows:3} "
                    f"{kind:6} pdl {pdl:d} {time_:9.2f} us {weight.nbytes / time_ / 1e6:6.2f} TB/s "
                    f"{config} {failed}",
                    flush=True,
                )


def measure_unpacking(name: str, label: str, weight: DeviceWeight) -> None:
    out = torch.empty(weight.rows, weight.columns, dtype=torch.float16, device=DEVICE)
    several = copies(weight)
    time_ = microseconds([partial(unpacking.unpack_to, w, out) for w in several], 2)
    moved = weight.nbytes + out.nbytes
    print(f"{name:5} {label:8} unpack {time_:9.2f} us {moved / time_ / 1e6:6.2f} TB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="rehearse on small weights")
    parser.add_argument("--quick", action="store_true", help="the default configurations only")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--forms", default="Q4_K,Q6_K")
    parser.add_argument("--shapes", default="", help="some of them, separated by /")
    options = parser.parse_args()
    counts = [int(count) for count in options.rows.split(",")]
    shapes = SMALL if options.small else SHAPES
    if options.shapes:
        shapes = {label: shapes[label] for label in options.shapes.split("/")}
    card = torch.cuda.get_device_name() if CUDA else "the interpreter"
    print(f"torch {torch.__version__} on {card}")
    print(f"read ceiling {read_ceiling(options.small):.2f} TB/s")
    for name in options.forms.split(","):
        for label, (rows, columns) in shapes.items():
            weight = random_weight(name, rows, columns)
            measure_unpacking(name, label, weight)
            measure(name, label, weight, counts, options.quick)
            del weight


if __name__ == "__main__":
    main()
