"""Application over a stub worker: called in process, or served on a local port."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import uvicorn
from fastapi import FastAPI
from limits.aio.storage import MemoryStorage
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.app import create_app
from gateway.http.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.settings.session import PAUSE_TRIGGERS
from kvrecall.telemetry.otel import OtelTracer
from kvrecall.telemetry.spans import Tracer
from kvrecall_server.testing import StubWorker
from services.access.authenticator import AccessPolicy
from services.access.control import AccessControl
from services.access.rates import Rates
from services.access.settings import AccessSettings
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import SessionService
from tests.research import nest_research


@dataclass
class Api:
    """Application with its service, worker and catalog."""

    app: FastAPI
    service: SessionService
    worker: Any
    catalog: SqliteCatalog
    http: httpx.AsyncClient

    async def session(self, **body: object) -> str:
        """Create a session, repaired in pauses alone, and return its id."""
        default = {"budget": 64, "method": "snapkv", "seed": 1, "repair_on": sorted(PAUSE_TRIGGERS)}
        answer = await self.http.post("/v1/sessions", json=nest_research(default | body))
        assert answer.status_code == 201, answer.text
        session: str = answer.json()["id"]
        return session

    async def turn(self, session: str, text: str = "hello", **body: object) -> httpx.Response:
        """Send a turn with one user message."""
        messages = [{"role": "user", "content": text}]
        return await self.http.post(
            f"/v1/sessions/{session}/turns", json={"messages": messages, **body}
        )


@pytest.fixture(autouse=True)
def plain_logs(own_log_settings: None) -> None:
    """Configure tracebacks without variables, which rich takes seconds to print, for each test."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    bound = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(
        processors=[structlog.processors.add_log_level, renderer], wrapper_class=bound
    )


@pytest.fixture
def service_settings() -> ServiceLimits:
    return ServiceLimits(
        queue_seconds=5, max_turn_bytes=2000, default_max_tokens=50, max_output_tokens=100
    )


@pytest.fixture
def gateway_settings() -> GatewaySettings:
    return GatewaySettings(max_body_bytes=10_000)


@pytest.fixture
def access_policy() -> AccessPolicy:
    """Whom the application believes; everybody, as no test but those of access makes keys."""
    return AccessPolicy()


@pytest.fixture
def access_settings() -> AccessSettings | None:
    """Settings with limits on rates; None: there are none."""
    return None


@pytest.fixture
def exported() -> InMemorySpanExporter:
    """The spans that ended in a test that asks for them."""
    return InMemorySpanExporter()


@pytest.fixture
def traces() -> bool:
    """Whether the application records spans; it does not."""
    return False


@pytest.fixture
def tracer(traces: bool, exported: InMemorySpanExporter) -> Tracer | None:
    """The application's tracer."""
    if not traces:
        return None
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return OtelTracer(provider)


@pytest.fixture
async def assembled(
    tmp_path: Path,
    service_settings: ServiceLimits,
    gateway_settings: GatewaySettings,
    access_policy: AccessPolicy,
    access_settings: AccessSettings | None,
    tracer: Tracer | None,
) -> AsyncIterator[Api]:
    """Application that is not started or served yet."""
    worker = StubWorker()
    catalog = await SqliteCatalog.open(tmp_path / "catalog.db")
    rates = None if access_settings is None else Rates(MemoryStorage(), access_settings)
    access = AccessControl(catalog.api_keys, access_policy, rates)
    service = SessionService(worker, catalog, service_settings, access)
    app = create_app(service, gateway_settings, tracer=tracer)
    yield Api(app, service, worker, catalog, httpx.AsyncClient())
    for gate in worker.gates.values():
        gate.set()


@pytest.fixture
async def api(assembled: Api) -> AsyncIterator[Api]:
    """Application called in process."""
    async with assembled.app.router.lifespan_context(assembled.app):
        transport = httpx.ASGITransport(assembled.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://kvrecall"
        ) as assembled.http:
            yield assembled


@pytest.fixture
async def served(assembled: Api) -> AsyncIterator[Api]:
    """Application on a port, in this event loop."""
    with _free_socket() as bound:
        server = uvicorn.Server(uvicorn.Config(assembled.app, log_config=None, lifespan="on"))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        base = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base, timeout=20) as assembled.http:
            await assembled.http.get(
                "/readyz"
            )  # the socket listens already: answered once the server runs
            yield assembled
        server.should_exit = True
        for gate in assembled.worker.gates.values():
            gate.set()
        await serving


@pytest.fixture(scope="module")
def live_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Application on a port, in a thread: for blocking callers."""
    ready = threading.Event()
    servers = []
    with _free_socket() as bound:

        async def serve() -> None:
            catalog = await SqliteCatalog.open(tmp_path_factory.mktemp("live") / "catalog.db")
            service = SessionService(StubWorker(), catalog, ServiceLimits(drain_seconds=5))
            app = create_app(service, GatewaySettings())
            servers.append(uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on")))
            asyncio.get_running_loop().call_soon(ready.set)
            await servers[0].serve(sockets=[bound])

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        ready.wait(10)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        servers[0].should_exit = True
        thread.join(10)


@contextlib.contextmanager
def _free_socket() -> Iterator[socket.socket]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(64)
        yield bound


@pytest.fixture
def parse_events() -> Callable[[str], list[tuple[str, Any]]]:
    """Parse the text of a stream into event names and data."""

    def parse(text: str) -> list[tuple[str, Any]]:
        assert text.endswith("\n\n")
        blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
        fields = [
            dict(line.split(": ", 1) for line in block if not line.startswith(":"))
            for block in blocks
        ]
        return [(field["event"], json.loads(field["data"])) for field in fields if field]

    return parse
