"""How fast a model runs here, end to end through the public API, and beside llama.cpp."""

from asyncllm.bench.made import synthetic_checkpoint
from asyncllm.bench.measure import bench
from asyncllm.bench.report import Figures, Load, Report, Row
from asyncllm.bench.workload import BenchError, Settings, Workload

__all__ = [
    "BenchError",
    "Figures",
    "Load",
    "Report",
    "Row",
    "Settings",
    "Workload",
    "bench",
    "synthetic_checkpoint",
]
