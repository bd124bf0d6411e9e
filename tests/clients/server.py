"""Servers for clients on a port of this machine: over a scripted worker, or `kvrecall serve`."""

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from gateway.app import create_app
from gateway.http.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits
from kvrecall_server.app.local.server import launch
from kvrecall_server.testing import StubWorker
from kvrecall_server.testing.stub_worker import Policy
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import SessionService
from tests.clients.exchanges import Exchange, Recorder
from tests.clients.policy import answer

MODEL = "scripted"
"""The stub worker's model."""
REFERENCE = "reference"
START_SECONDS = 30
# Agents' prompts have thousands of words; none of them reaches this.
_CONTEXT = 200_000


@dataclass(frozen=True)
class ScriptedServer:
    """A server in a thread, its worker, and all requests that it answered, oldest first."""

    url: str
    worker: StubWorker
    exchanges: list[Exchange]
    _loop: asyncio.AbstractEventLoop

    def hold(self) -> None:
        """Let turns wait before their first token."""
        self.worker.gates["token"] = asyncio.Event()
        self.worker.reached["token"].clear()

    def release(self) -> None:
        """Let held turns go on."""
        self._loop.call_soon_threadsafe(self.worker.gates.pop("token").set)


@contextmanager
def serve(policy: Policy = answer) -> Iterator[ScriptedServer]:
    """Serve in a thread for as long as the context."""
    ready = threading.Event()
    servers: list[tuple[uvicorn.Server, asyncio.AbstractEventLoop]] = []
    worker = StubWorker(policy=policy)
    worker.context = _CONTEXT
    exchanges: list[Exchange] = []
    with tempfile.TemporaryDirectory() as folder, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(64)

        async def run() -> None:
            catalog = await SqliteCatalog.open(Path(folder) / "catalog.db")
            service = SessionService(worker, catalog, ServiceLimits())
            app = Recorder(create_app(service, GatewaySettings()), exchanges)
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
            loop = asyncio.get_running_loop()
            servers.append((server, loop))
            loop.call_soon(ready.set)
            await server.serve(sockets=[bound])

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        if not ready.wait(START_SECONDS):
            raise TimeoutError("the server did not start")
        server, loop = servers[0]
        try:
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            yield ScriptedServer(url, worker, exchanges, loop)
        finally:
            server.should_exit = True
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
