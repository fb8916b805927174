"""Loads, stores and calls at addresses, for kernels: numba knows them as ordinary functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from asyncllm.kernels.cpu import vectors as v


def _load(kind: Any, result: Any, align: int) -> Any:
    def load(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return v.load(builder, arguments[0], kind, align)

        return result(types.int64), generate

    return intrinsic(load)


def _store(kind: Any, value_type: Any, align: int) -> Any:
    def store(context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[1]
            if isinstance(kind, ir.IntType) and value.type != kind:
                value = builder.trunc(value, kind)
            v.store(builder, value, arguments[0], align)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return intrinsic(store)


load_i64 = _load(v.I64, types.int64, 8)
load_i32 = _load(v.I32, types.int32, 4)
load_u8 = _load(v.I8, types.uint8, 1)
load_f32 = _load(v.F32, types.float32, 4)
load_f64 = _load(ir.DoubleType(), types.float64, 8)
store_i64 = _store(v.I64, types.int64, 8)
store_i32 = _store(v.I32, types.int64, 4)
store_u8 = _store(v.I8, types.int64, 1)
store_f32 = _store(v.F32, types.float32, 4)


@intrinsic
def call_kernel(
    context: Any, kernel: Any, parameters: Any, step: Any, unit: Any, thread: Any
) -> Any:
    """Call a compiled kernel by its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [v.I64] * 4)
        builder.call(v.pointer(builder, arguments[0], kind), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
