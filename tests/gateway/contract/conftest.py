"""One application behind REST and gRPC; a test of the contract runs with a client of each."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvicorn

from gateway.app import create_app
from gateway.grpc.server import GrpcServer
from gateway.grpc.settings import GrpcSettings
from gateway.http.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits
from kvrecall_server.testing import StubWorker
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import SessionService
from tests.gateway.contract.clients import Client, RestClient
from tests.gateway.contract.grpc_client import GrpcClient

WAITS = 10_000


@dataclass
class Both:
    """A service behind both APIs, on ports of this event loop."""

    service: SessionService
    worker: StubWorker
    catalog: SqliteCatalog
    rest: RestClient
    rpc: GrpcClient


@pytest.fixture
async def both(
    tmp_path: Path, service_settings: ServiceLimits, gateway_settings: GatewaySettings
) -> AsyncIterator[Both]:
    worker = StubWorker()
    catalog = await SqliteCatalog.open(tmp_path / "catalog.db")
    service = SessionService(worker, catalog, service_settings)
    rpc = GrpcServer("127.0.0.1:0", GrpcSettings(), gateway_settings)
    app = create_app(service, gateway_settings, rpc)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        base = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with (
            httpx.AsyncClient(base_url=base, timeout=60) as http,
            grpc.aio.insecure_channel(rpc.address) as channel,
        ):
            await http.get("/readyz")  # answered once the application runs
            yield Both(service, worker, catalog, RestClient(http), GrpcClient(channel))
        for gate in worker.gates.values():
            gate.set()
        server.should_exit = True
        await serving


@pytest.fixture(params=["rest", "rpc"])
def client(request: pytest.FixtureRequest, both: Both) -> Client:
    """Client of one of the APIs."""
    found: Any = getattr(both, request.param)
    return found


@pytest.fixture
def worker(both: Both) -> StubWorker:
    """The stub worker behind both."""
    return both.worker


@pytest.fixture
def until_async() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until a condition holds."""

    async def wait(holds: Callable[[], bool]) -> None:
        for _ in range(WAITS):
            if holds():
                return
            await asyncio.sleep(0.01)
        pytest.fail("the condition did not come to hold")

    return wait
