"""A gRPC server over a stub worker, in the event loop of the test."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from limits.aio.storage import MemoryStorage

from gateway.app import create_app
from gateway.grpc.server import GrpcServer
from gateway.grpc.settings import GrpcSettings
from gateway.http.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.sessions_v1.sessions_pb2_grpc import SessionsStub
from kvrecall.telemetry.spans import Tracer
from kvrecall_server.testing import StubWorker
from services.access.authenticator import AccessPolicy
from services.access.control import AccessControl
from services.access.rates import Rates
from services.access.settings import AccessSettings
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import SessionService


@dataclass
class Rpc:
    """A running server with its service, worker, and a channel and stub."""

    server: GrpcServer
    service: SessionService
    catalog: SqliteCatalog
    worker: StubWorker
    app: Any
    channel: grpc.aio.Channel
    stub: Any


NewRpc = Callable[..., Any]


@pytest.fixture
async def new_rpc(
    tmp_path: Path,
    access_policy: AccessPolicy,
    access_settings: AccessSettings | None,
    tracer: Tracer | None,
) -> AsyncIterator[NewRpc]:
    """new_rpc(settings, limits, credentials): starts a server, which ends with the test."""
    numbers = count()
    async with AsyncExitStack() as stack:

        async def start(
            settings: GrpcSettings | None = None,
            limits: GatewaySettings | None = None,
            credentials: grpc.ChannelCredentials | None = None,
        ) -> Rpc:
            catalog = await SqliteCatalog.open(tmp_path / f"{next(numbers)}.db")
            rates = None if access_settings is None else Rates(MemoryStorage(), access_settings)
            access = AccessControl(catalog.api_keys, access_policy, rates)
            own = settings or GrpcSettings()
            return await stack.enter_async_context(
                run(catalog, access, own, limits or GatewaySettings(), credentials, tracer)
            )

        yield start


@pytest.fixture
async def rpc(new_rpc: NewRpc) -> Rpc:
    """A server with the default settings."""
    found: Rpc = await new_rpc()
    return found


@asynccontextmanager
async def run(
    catalog: SqliteCatalog,
    access: AccessControl,
    settings: GrpcSettings,
    limits: GatewaySettings,
    credentials: grpc.ChannelCredentials | None,
    tracer: Tracer | None,
) -> AsyncIterator[Rpc]:
    """Run a server on a free port."""
    worker = StubWorker()
    limited = ServiceLimits(drain_seconds=5, queue_seconds=5)
    service = SessionService(worker, catalog, limited, access)
    server = GrpcServer("127.0.0.1:0", settings, limits)
    app = create_app(service, limits, server, tracer)
    # Read at once what was sent, so that a client that does not read is seen as one.
    options = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
    channel = (
        grpc.aio.insecure_channel(server.address, options=options)
        if credentials is None
        else grpc.aio.secure_channel(server.address, credentials, options=options)
    )
    async with app.router.lifespan_context(app), channel:
        yield Rpc(server, service, catalog, worker, app, channel, SessionsStub(channel))
        for gate in worker.gates.values():
            gate.set()
