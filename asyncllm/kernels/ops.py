"""The one dispatch table: (operation, format, device) to the kernel that serves it.

A backend adds rows in front of the reference ones, each with the condition under which it serves;
why a row was refused is recorded. The reference rows serve every format on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from asyncllm.kernels import reference

Condition = Callable[..., str | None]


def _always(**_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row of the table.

    Attributes:
        operation: a function's name in `reference`, whose arguments it takes.
        name: says which implementation it is.
        run: the implementation.
        formats: weight formats it serves; `None`: all, and operations without weights.
        devices: kinds of device it serves; `None`: all.
        refuses: given what is known of the call (dimensions by name), why it cannot serve it, or
            `None` if it can.
    """

    operation: str
    name: str
    run: Callable[..., None]
    formats: frozenset[str] | None = None
    devices: frozenset[str] | None = None
    refuses: Condition = _always


REFERENCE_ROWS = (
    Kernel("linear", "float32", reference.linear_float32, formats=frozenset({"F32"})),
    *(
        Kernel(run.__name__, "reference", run)
        for run in (
            reference.linear,
            reference.embedding,
            reference.rms_norm,
            reference.rope,
            reference.attention,
            reference.gated,
            reference.softcap,
        )
    ),
)


class KernelTable:
    """Chooses kernels, the first row that can serve; records why others could not.

    Attributes:
        refusals: (operation, format, device, kernel) to the reason.
    """

    def __init__(self, rows: Iterable[Kernel] = REFERENCE_ROWS) -> None:
        self._rows = list(rows)
        self.refusals: dict[tuple[str, str | None, str, str], str] = {}

    def choose(
        self, operation: str, *, device: str, format: str | None = None, **facts: Any
    ) -> Callable[..., None]:
        """The kernel for an operation.

        Args:
            operation: what is to be done.
            device: kind of device, `"cpu"` or `"cuda"`.
            format: of the weight, if it has one.
            **facts: dimensions and the like, for the rows' conditions.

        Raises:
            LookupError: no row serves it.
        """
        for row in self._rows:
            if row.operation != operation:
                continue
            if row.formats is not None and format not in row.formats:
                continue
            if row.devices is not None and device not in row.devices:
                continue
            reason = row.refuses(**facts)
            if reason is None:
                return row.run
            self.refusals[operation, format, device, row.name] = reason
        raise LookupError(f"no kernel for {operation} of format {format} on {device}")
