"""`kvrecall serve`: the whole service in one process."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer
from rich.console import Console

from kvrecall.cli.errors import CannotServe
from kvrecall.cli.settings import LogFormat, Settings

if TYPE_CHECKING:
    from services.service import SessionService

LISTENING = "kvrecall is listening on "
TEST_INSTRUMENT = (
    "The packaged reference model is a test instrument and a demo, trained on generated conversations. It is no "
    "assistant; --model takes any Hugging Face causal LM."
)


def serve_command(
    model: Annotated[str | None, typer.Option(help="Causal LM, by path or hub name. Default: the reference.")] = None,
    data: Annotated[Path | None, typer.Option(help="Where sessions are kept. Default: ./kvrecall-data.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Sessions whose active rows are in memory.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Largest budget of a session, in rows.")] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Tokens prefilled in one step.")] = None,
    ram: Annotated[int | None, typer.Option(min=1, help="MiB of rows in memory beside the files.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the model's.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: any free port. Default: 8420.")] = None,
    log: Annotated[LogFormat | None, typer.Option(help="console or json, on standard error.")] = None,
    until_input_ends: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
) -> None:
    """Serve sessions over HTTP; every setting can also come from the environment (KVRECALL_...)."""
    worker = {"slots": slots, "max_budget": budget, "block_tokens": block}
    chosen: dict[str, Any] = {"model": model, "data": data, "dtype": dtype, "host": host, "port": port, "log": log}
    if ram is not None:
        chosen["ram_bytes"] = ram << 20
    settings = Settings(**given({**chosen, "worker": given(worker)}))
    set_up_process(settings, until_input_ends)
    console = Console()

    async def build() -> "SessionService":
        from kvrecall.cli.build import build_service  # with torch, which takes seconds to import

        say_what_is_served(settings, console)
        return await build_service(settings)

    asyncio.run(run_service(settings, console, build))


def set_up_process(settings: Settings, until_input_ends: bool) -> None:
    """What a process that serves needs before anything else."""
    set_up_logs(settings.log)
    if until_input_ends:
        threading.Thread(target=_end_with_input, daemon=True).start()


def say_what_is_served(settings: Settings, console: Console) -> None:
    """Whoever starts the reference model is told what it is."""
    if settings.is_reference_model:
        console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)


async def run_service(settings: Settings, console: Console, build: "Callable[[], Awaitable[SessionService]]") -> None:
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
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    renderer: Any = structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer()
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
        raise CannotServe(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from error
    # Its connections inherit this. asyncio sets it only where a socket names its protocol, which this one does not;
    # the second half of an answer would wait for the client to acknowledge the first, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that have a value: the others are left to the environment and the defaults."""
    return {name: value for name, value in options.items() if value is not None}
