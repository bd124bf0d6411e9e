"""Serving processes: logs, signals, the HTTP server."""

import asyncio
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import structlog
from rich.console import Console

from kvrecall.telemetry.spans import Tracer
from kvrecall_server.app.errors import CannotServe, describe_os_error
from kvrecall_server.app.logs import set_up_logs
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.tracing import EXPORT_SECONDS, build_tracer

if TYPE_CHECKING:
    from gateway.grpc.server import GrpcServer
    from kvrecall.domain.worker_info import WorkerInfo
    from kvrecall.metrics.page import Metrics
    from services.service import SessionService

LISTENING = "kvrecall is listening on "
GRPC = "gRPC on "
CONSOLE = "Console: "
TEST_INSTRUMENT = (
    "The packaged reference model is a test instrument, trained on generated conversations. "
    "It is not an assistant; --model takes any Hugging Face causal LM, a GGUF file, or smollm2."
)

_log = structlog.get_logger("kvrecall.process")


def set_up_process(
    settings: Settings, until_input_ends: bool, component: str, worker: str = ""
) -> None:
    """Configure the logs of a `component`, the command that serves; `worker`: its name, if it has one.

    With `until_input_ends` the process ends when its standard input does.
    """
    set_up_logs(settings.log, settings.log_level, component, worker)
    _log.info("starting", data=str(settings.data))
    if until_input_ends:
        threading.Thread(target=_end_with_input, daemon=True).start()


def warn_about_reference_model(settings: Settings, console: Console) -> None:
    """Print a warning if the reference model is served."""
    if settings.is_reference_model:
        console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)


async def run_service(
    settings: Settings,
    console: Console,
    build: "Callable[[], Awaitable[SessionService]]",
    component: str = "gateway",
    local: "Sequence[Metrics]" = (),
) -> None:
    """Serve the result of `build` over HTTP until SIGTERM or SIGINT. Raises CannotServe.

    `component` is the command, which traces name; `local` are the metrics of a worker in this process.
    """
    tracer = build_tracer(component)
    try:
        await _serve(settings, console, build, tracer, local)
    finally:
        tracer.close(EXPORT_SECONDS)


async def _serve(
    settings: Settings,
    console: Console,
    build: "Callable[[], Awaitable[SessionService]]",
    tracer: Tracer,
    local: "Sequence[Metrics]",
) -> None:
    from kvrecall_server.app.access import require_key

    await require_key(settings)
    with _listener(settings.host, settings.port) as listener:
        # The web framework takes long to import: an address in use is refused before.
        import uvicorn

        from gateway.app import create_app
        from gateway.http.server import server_options

        rpc = _bind_grpc(settings)
        service = await build()
        gateway = settings.gateway.for_listener(settings.host)

        class Server(uvicorn.Server):
            """Prints its address once it listens, and gives notice before it stops listening."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    if rpc is not None:
                        console.print(f"{GRPC}{rpc.address}", soft_wrap=True, highlight=False)
                    url, info = _url(listener), service.known_info
                    _log.info("listening", url=url, model=info.model if info else "")
                    pages = (f"{CONSOLE}{url}/console/",) if gateway.console else ()
                    for line in (*pages, *_describe_clients(url, info), f"{LISTENING}{url}"):
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
            create_app(service, gateway, rpc, tracer, local),
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


def _end_with_input() -> None:
    """Send SIGTERM to this process when its input ends, also when its parent was killed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _describe_clients(url: str, info: "WorkerInfo | None") -> tuple[str, ...]:
    """Describe what clients of other APIs are given, in a line each."""
    if info is None:
        return ("No worker has joined yet: requests are answered with 503 until one has.",)
    key = "a key of `kvrecall keys create`, or any text while there is none"
    return (
        f"OpenAI's clients: base_url={url}/v1 model={info.model}",
        f"Anthropic's clients: base_url={url} model={info.model}",
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
            f"cannot listen on {host} port {port}: {describe_os_error(error)}; choose another --port"
        ) from error
    # Inherited by its connections. asyncio sets it only for sockets that name their protocol, which
    # this one does not; the second part of a response would wait 40 ms for a delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
