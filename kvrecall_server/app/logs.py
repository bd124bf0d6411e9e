"""Logs of serving processes: one stream on standard error, JSON or for people, without secrets.

Our own events and what libraries log through `logging` and `warnings` have the same form. A line in
JSON has at least `timestamp`, `level`, `event` and `component`; docs/operations.md has the others.
"""

import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, MutableMapping
from importlib.metadata import version
from types import TracebackType
from typing import Any

import structlog
from rich.console import Console

from kvrecall.telemetry.spans import current_span
from kvrecall_server.app.settings import LogFormat, LogLevel
from services.access.keys import redact_keys

Event = MutableMapping[str, Any]

_ENCODER = json.JSONEncoder()
# The password of `scheme://user:password@host`.
_URL_PASSWORD = re.compile(r"(://[^\s/:@\"]*:)[^\s/@\"]+(?=@)")
# Environment in which native code and progress bars write nothing: read at their import.
QUIET_LIBRARIES = {
    "GRPC_VERBOSITY": "NONE",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
}


def set_up_logs(
    form: LogFormat, level: LogLevel = "info", component: str = "kvrecall", worker: str = ""
) -> None:
    """Log to standard error from `level` on; libraries from warnings on, with `debug` from info on.

    `component` is the command, on every line in JSON, `worker` the worker's name, on every line. May be
    called again, once the name is known. In JSON nothing else writes there: no progress bars, no traceback
    of the interpreter.
    """
    # People see on their terminal which command runs.
    origin = {"component": component, "version": version("kvrecall")} if form == "json" else {}
    if worker:
        origin["worker"] = worker
    shared = _build_processors(origin)
    renderer: Any = structlog.dev.ConsoleRenderer(colors=_shows_colors())
    if form == "json":
        renderer = structlog.processors.JSONRenderer(_to_json)
        for name, value in QUIET_LIBRARIES.items():
            os.environ.setdefault(name, value)
        _catch_tracebacks()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_get_number(level)),
        logger_factory=_StderrLogger,
    )
    handler = LogHandler(form)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [each for each in root.handlers if not isinstance(each, LogHandler)]
    root.addHandler(handler)
    root.setLevel(logging.INFO if level == "debug" else max(_get_number(level), logging.WARNING))
    logging.captureWarnings(True)


def hide_variables() -> None:
    """Keep variables out of tracebacks in a process whose logs were not set up.

    structlog's own renderer shows them, and they hold messages. Does nothing where structlog is
    configured.
    """
    if structlog.is_configured():
        return
    *processors, renderer = structlog.get_config()["processors"]
    formatted = structlog.processors.ExceptionRenderer(format_error)
    structlog.configure(processors=[*processors, formatted, renderer])


def adopt_loggers() -> None:
    """Take over the loggers of imported libraries that write to standard error by themselves.

    Does nothing in a process whose logs were not set up: its libraries may write as they like.
    """
    if not any(isinstance(each, LogHandler) for each in logging.getLogger().handlers):
        return
    for found in list(logging.root.manager.loggerDict.values()):
        if not isinstance(found, logging.Logger):
            continue  # a name above a logger's, without one of its own
        own = [each for each in found.handlers if type(each) is logging.StreamHandler]
        for handler in own:
            found.removeHandler(handler)
        if own:
            found.propagate = True


def logs_json() -> bool:
    """Return whether this process logs JSON, so that nothing else may be written there."""
    handlers = logging.getLogger().handlers
    return any(isinstance(each, LogHandler) and each.form == "json" for each in handlers)


def _build_processors(origin: Event) -> list[Any]:
    """Build what makes an event of a call: ids, origin, level, time, error."""

    def add_origin(_: Any, __: str, event: Event) -> Event:
        return {**event, **{name: event.get(name, value) for name, value in origin.items()}}

    return [
        structlog.contextvars.merge_contextvars,
        _add_trace,
        add_origin,
        structlog.processors.add_log_level,
        _add_logger,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.ExceptionRenderer(format_error),
    ]


def _add_trace(_: Any, __: str, event: Event) -> Event:
    """Add the id of the trace that the event is a part of."""
    if trace_id := current_span().trace_id:
        event["trace_id"] = trace_id
    return event


def _add_logger(logger: Any, _: str, event: Event) -> Event:
    """Add the name of the logger, ours or a library's."""
    record = event.get("_record")
    name = logger.name if record is None else record.name
    if name:
        event["logger"] = name
    return event


def format_error(exc_info: Any) -> str:
    """Format an exception, the newest first, as a traceback that repeats nothing of a request.

    Without variables; and without the messages of errors about values and keys, which quote them.
    """
    parts = []
    error: BaseException | None = exc_info[1]
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.append(f"{frames}{describe_error(error)}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\nwhile handling:\n".join(parts)


def describe_error(error: BaseException) -> str:
    """Return the type of an exception, and its message unless that may quote a request."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    quotes = isinstance(error, ValueError | LookupError | AssertionError)
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    lines = [name if quotes else f"{name}: {error}", *(describe_error(each) for each in inner)]
    return "\n".join(lines)


def redact(line: str) -> str:
    """Replace the secrets of API keys and the passwords of URLs in a line."""
    line = redact_keys(line)
    return _URL_PASSWORD.sub(r"\1...", line) if "@" in line else line


class LogHandler(logging.Handler):
    """Writes what libraries log to the standard error of the moment."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self.form = form

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; one that cannot be formatted is named instead of printed."""
        if _tells_of_a_client_that_left(record):
            return
        try:
            line = self.format(record)
        except Exception as error:  # a library's mistake must not end its work
            structlog.get_logger(record.name).warning(
                "log line not formatted", reason=type(error).__name__, at=record.module
            )
            return
        _write(line)


def _tells_of_a_client_that_left(record: logging.LogRecord) -> bool:
    """Recognise what gRPC's server logs as an error where a client leaves while it is answered."""
    return record.name == "grpc._cython.cygrpc" and str(record.msg).startswith("ExecuteBatchError")


class _StderrLogger:
    """Writes our own lines; `name` is that of `structlog.get_logger`."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        """Write a line."""
        _write(line)

    log = debug = info = warning = error = critical = exception = msg


def _write(line: str) -> None:
    """Write a line to the standard error of the moment: a test that replaces it may close it."""
    sys.stderr.write(f"{redact(line)}\n")
    sys.stderr.flush()


def _to_json(event: Any, default: Callable[[Any], Any]) -> str:
    """Encode an event; `default` converts what JSON has no form for."""
    try:
        return _ENCODER.encode(event)  # with arguments, json.dumps builds an encoder for each line
    except TypeError:
        return json.dumps(event, default=default)


def _catch_tracebacks() -> None:
    """Log uncaught errors, which the interpreter would print."""
    log = structlog.get_logger("kvrecall.process")

    def log_error(kind: type[BaseException], error: Any, frames: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        log.critical("uncaught error", exc_info=(kind, error, frames))

    def log_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        log.error("uncaught error", exc_info=(unraisable.exc_type, error, unraisable.exc_traceback))

    def log_thread_error(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            log_error(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = log_error
    sys.unraisablehook = log_unraisable
    threading.excepthook = log_thread_error


def _shows_colors() -> bool:
    """Whether standard error is a terminal with colours; NO_COLOR and TERM=dumb are honoured."""
    console = Console(stderr=True)
    return console.color_system is not None and not console.no_color


def _get_number(level: LogLevel) -> int:
    return logging.getLevelNamesMapping()[level.upper()]
