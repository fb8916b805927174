"""Which vector instructions the kernels are written for, and which of them this machine has."""

from __future__ import annotations

from enum import IntEnum


class Isa(IntEnum):
    """Forms of the kernels. All give the same bits; a later one is faster where it runs."""

    PORTABLE = 0
    """Plain vector IR, which LLVM turns into what the machine has (NEON and others)."""
    AVX2 = 1
    AVX2_VNNI = 2
    AVX512_VNNI = 3


_NEEDS = {
    Isa.AVX512_VNNI: ("avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    Isa.AVX2_VNNI: ("avx2", "fma", "f16c", "avxvnni"),
    Isa.AVX2: ("avx2", "fma", "f16c"),
}


def detect_isa() -> Isa:
    """The fastest form that numba's target serves, so numba's own way of forcing one counts."""
    from numba.core.registry import cpu_target

    features = str(cpu_target.target_context.codegen().magic_tuple()[2]).split(",")
    for isa, needed in _NEEDS.items():
        if all(f"+{name}" in features for name in needed):
            return isa
    return Isa.PORTABLE
