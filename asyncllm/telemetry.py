"""Named records with fields, through structlog onto the standard logger `asyncllm`.

Silent until the application gives that logger a handler; when the level is off a record costs one
comparison and structlog is not even imported. structlog's global configuration is left alone.
"""

from __future__ import annotations

import logging
from typing import Any

_logger = logging.getLogger("asyncllm")
_logger.addHandler(logging.NullHandler())
_structured: Any = None


def enabled(level: int = logging.DEBUG) -> bool:
    """Whether a record of this level would reach anyone."""
    return _logger.isEnabledFor(level)


def record(event: str, *, level: int = logging.DEBUG, **values: object) -> None:
    """Log the named event (`sched-phase`, `load-stage` and so on) with its fields.

    The log record's message is `event key=value ...`; its attributes `event` and `fields` carry
    the same for handlers that want data.
    """
    if _logger.isEnabledFor(level):
        _bound().log(level, event, **values)


def _bound() -> Any:
    global _structured
    if _structured is None:
        import structlog

        _structured = structlog.wrap_logger(
            _logger,
            processors=[_render],
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
            cache_logger_on_first_use=False,
        )
    return _structured


def _render(_logger: object, _method: str, event_dict: Any) -> tuple[tuple[str], dict[str, Any]]:
    values = dict(event_dict)
    event = values.pop("event")
    line = " ".join([event, *(f"{key}={value}" for key, value in values.items())])
    # "%" in a value must not be taken for a format: without args logging formats nothing.
    return (line,), {"extra": {"event": event, "fields": values}}
