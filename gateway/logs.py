"""How the service's log looks: called once by whoever starts a process, never by the application itself."""

import logging
import sys
from typing import TextIO

import structlog


def configure_logs(level: str = "info", json_lines: bool = True, stream: TextIO = sys.stderr) -> None:
    """Write the log to `stream`, as JSON lines or for people. Tracebacks never show variables: they hold what was said.

    Levels are those of the standard library, in any case.
    """
    shown: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json_lines
        else [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *shown,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
