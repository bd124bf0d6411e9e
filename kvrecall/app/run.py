"""Run a process that serves: logs, signals, the HTTP server."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog
from rich.console import Console

from kvrecall.app.errors import CannotServe
from kvrecall.app.settings import LogFormat, Settings

if TYPE_CHECKING:
    from services.service import SessionService

LISTENING = "kvrecall is listening on "
TEST_INSTRUMENT = (
    "The packaged reference model is a test instrument and a demo, trained on generated conversations. It is no "
    "assistant; --model takes any Hugging Face causal LM."
)


def set_up_process(settings: Settings, until_input_ends: bool) -> None:
    """What a process that serves needs before anything else."""
    set_up_logs(settings.log)
    if until_input_ends:
        threading.Thread(target=_end_with_input, daemon=True).start()


def say_what_is_served(settings: Settings, console: Console) -> None:
    """Whoever starts the reference model is told what it is."""
    if settings.is_reference_model:
        console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)


async def run_service(
    settings: Settings, console: Console, build: "Callable[[], Awaitable[SessionService]]"
) -> None:
    """Serve what `build` makes over HTTP until a signal ends it. Raises CannotServe."""
    # The web framework takes long to import: other commands do without.
    import uvicorn

    from gateway.app import create_app

    with _listener(settings.host, settings.port) as listener:
        service = await build()

        class Server(uvicorn.Server):
            """Says where it listens once it does."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    console.print(f"{LISTENING}{_url(listener)}", soft_wrap=True, highlight=False)

        config = uvicorn.Config(
            create_app(service, settings.gateway),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(settings.service.drain_seconds),
        )
        server = Server(config)
        # uvicorn ends on these signals in good order, then raises them again for whoever handled them before.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        await server.serve(sockets=[listener])
        if not server.started:
            raise CannotServe("the service did not start; the log above says why")


def set_up_logs(form: LogFormat) -> None:
    """structlog and the libraries' own warnings, on standard error."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    renderer: Any = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *([structlog.processors.format_exc_info] if form == "json" else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # Looked up at each use: whoever replaces the stream, as a test does, may close the one of now.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def _end_with_input() -> None:
    """For a server that another command started: it ends when that one does, be it killed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


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
    # Its connections inherit this. asyncio sets it only where a socket names its protocol, which this one does not;
    # the second half of an answer would wait for the client to acknowledge the first, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
