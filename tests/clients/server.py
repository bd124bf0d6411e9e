"""Servers for clients on a port of this machine: over a scripted worker, or `kvrecall serve`."""

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from gateway.app import create_app
from gateway.settings import GatewaySettings
from kvrecall.app.local_server import launch
from kvrecall.domain.limits import ServiceLimits
from kvrecall.testing import StubWorker
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import SessionService
from tests.clients.policy import answer

MODEL = "scripted"
"""The stub worker's model."""
REFERENCE = "reference"
START_SECONDS = 30


@contextmanager
def serve() -> Iterator[str]:
    """Serve in a thread for as long as the context; its value is the address."""
    ready = threading.Event()
    servers: list[uvicorn.Server] = []
    with tempfile.TemporaryDirectory() as folder, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(64)

        async def run() -> None:
            catalog = await SqliteCatalog.open(Path(folder) / "catalog.db")
            service = SessionService(StubWorker(policy=answer), catalog, ServiceLimits())
            app = create_app(service, GatewaySettings())
            servers.append(uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on")))
            asyncio.get_running_loop().call_soon(ready.set)
            await servers[0].serve(sockets=[bound])

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        if not ready.wait(START_SECONDS):
            raise TimeoutError("the server did not start")
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            servers[0].should_exit = True
            thread.join(START_SECONDS)


@contextmanager
def serve_reference() -> Iterator[str]:
    """Run `kvrecall serve` with the packaged model for as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "data")
        arguments = ["--model", REFERENCE, "--port", "0", "--data", data]
        process, url = launch(arguments, Path(folder) / "log", environment={**os.environ})
        with process:
            try:
                yield url
            finally:
                process.terminate()
