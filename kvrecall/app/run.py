"""Serving processes: logs, signals, the HTTP server."""

import asyncio
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog
from rich.console import Console

from kvrecall.app.errors import CannotServe
from kvrecall.app.settings import LogFormat, Settings
from services.access.keys import redact_keys

if TYPE_CHECKING:
    from gateway.grpc.server import GrpcServer
    from services.service import SessionService

_ENCODER = json.JSONEncoder()

LISTENING = "kvrecall is listening on "
GRPC = "gRPC on "
TEST_INSTRUMENT = (
    "The packaged reference model is a test instrument, trained on generated conversations. "
    "It is not an assistant; --model takes any Hugging Face causal LM, a GGUF file, or smollm2."
)


def set_up_process(settings: Settings, until_input_ends: bool) -> None:
    """Configure logs; with `until_input_ends`, end the process when its standard input ends."""
    set_up_logs(settings.log)
    if until_input_ends:
        threading.Thread(target=_end_with_input, daemon=True).start()


def warn_about_reference_model(settings: Settings, console: Console) -> None:
    """Print a warning if the reference model is served."""
    if settings.is_reference_model:
        console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)


async def run_service(
    settings: Settings, console: Console, build: "Callable[[], Awaitable[SessionService]]"
) -> None:
    """Serve the result of `build` over HTTP until SIGTERM or SIGINT. Raises CannotServe."""
    # The web framework takes long to import: other commands do without.
    import uvicorn

    from gateway.app import create_app
    from gateway.server import server_options
    from kvrecall.app.access import require_key

    await require_key(settings)
    with _listener(settings.host, settings.port) as listener:
        rpc = _bind_grpc(settings)
        service = await build()

        class Server(uvicorn.Server):
            """Prints its address once it listens, and gives notice before it stops listening."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    if rpc is not None:
                        console.print(f"{GRPC}{rpc.address}", soft_wrap=True, highlight=False)
                    url = _url(listener)
                    for line in (*_describe_clients(url, service.info.model), f"{LISTENING}{url}"):
                        console.print(line, soft_wrap=True, highlight=False, markup=False)

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                # Load balancers see that the service is not ready while it still listens. One
                # deadline from here on: for the notice, open requests and running turns.
                service.announce_stop()
                if rpc is not None:
                    await rpc.announce_stop()
                await asyncio.sleep(settings.service.notice_seconds)
                self.config.timeout_graceful_shutdown = math.ceil(service.announce_stop())
                if rpc is not None:  # both at once; the application waits for its end
                    rpc.begin_stop(service.announce_stop())
                await super().shutdown(sockets)

        config = uvicorn.Config(
            create_app(service, settings.gateway, rpc),
            log_config=None,
            access_log=False,
            **server_options(settings.gateway),
        )
        server = Server(config)
        # uvicorn shuts down on these signals, then raises them again for the previous handlers.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        await server.serve(sockets=[listener])
        if not server.started:
            raise CannotServe("the service did not start; see the log above")


def _bind_grpc(settings: Settings) -> "GrpcServer | None":
    """Bind the address of the gRPC API, if there is one. Raises CannotServe."""
    from gateway.grpc.server import CannotListen, GrpcServer

    if settings.grpc.listen is None:
        return None
    try:
        return GrpcServer(settings.grpc.listen, settings.grpc, settings.gateway)
    except CannotListen as error:
        raise CannotServe(str(error)) from error


def set_up_logs(form: LogFormat) -> None:
    """Log to standard error: structlog's events and the libraries' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    renderer: Any = (
        structlog.processors.JSONRenderer(_to_json)
        if form == "json"
        else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.ExceptionRenderer(format_error),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: _StderrLogger(),
    )


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


class _Formatter(logging.Formatter):
    """Format of the libraries' log lines, with the same care as for our own."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a line without the secrets of keys."""
        return redact_keys(super().format(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 the name is logging's
        """Format an exception without what it may quote."""
        return format_error(ei)


def _to_json(event: Any, default: Callable[[Any], Any]) -> str:
    """Encode an event; `default` converts what JSON has no form for."""
    try:
        return _ENCODER.encode(event)  # with arguments, json.dumps builds an encoder for each line
    except TypeError:
        return json.dumps(event, default=default)


class _StderrLogger:
    """Writes lines to the standard error of the moment: a test that replaces it may close it."""

    def msg(self, line: str) -> None:
        """Write a line, without the secrets of keys."""
        sys.stderr.write(f"{redact_keys(line)}\n")
        sys.stderr.flush()

    log = debug = info = warning = error = critical = exception = msg


def _end_with_input() -> None:
    """Send SIGTERM to this process when its input ends, also when its parent was killed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _describe_clients(url: str, model: str) -> tuple[str, ...]:
    """Describe what clients of other APIs are given, in a line each."""
    key = "a key of `kvrecall keys create`, or any text while there is none"
    return (
        f"OpenAI's clients: base_url={url}/v1 model={model}",
        f"Anthropic's clients: base_url={url} model={model}",
        f"api_key: {key}",
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise CannotServe(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
        ) from error
    # Inherited by its connections. asyncio sets it only for sockets that name their protocol, which
    # this one does not; the second part of a response would wait 40 ms for a delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
