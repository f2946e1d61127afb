"""Structured logs: one JSON object a line on standard error, with the call's and the job's ids in every one."""

from __future__ import annotations

import logging
import sys

import structlog

# Without the local variables of each frame, which hold prompts and credentials.
_tracebacks = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


class _StderrLogger(structlog.WriteLogger):
    """Writes each line to standard error. `name`: what `structlog.get_logger` was given."""

    def __init__(self, name: str = "") -> None:
        super().__init__(sys.stderr)
        self.name = name


def configure_logging(level: str = "INFO") -> None:
    """Sends structlog and the standard library's logging through one JSON renderer to standard error."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _tracebacks,
    ]
    # Straight to the stream: through the standard library a line, of which each call has one, costs four times as much.
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
