"""Metrics while the catalog's Redis is silent: what is known, soon, for who was known before."""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import httpx
import pytest
import structlog
from structlog.testing import capture_logs

from gateway.app import create_app
from gateway.http.settings import GatewaySettings
from gateway.metrics import status
from kvrecall.domain.limits import ServiceLimits
from kvrecall_server.app.redis import redis_client
from kvrecall_server.testing import StubWorker
from services.access.authenticator import AccessPolicy
from services.access.control import AccessControl
from services.access.keys import digest_key, get_pepper_id, make_key
from services.access.principals import Scope
from services.catalog.api_keys import KeyRecord
from services.catalog.redis.catalog import RedisCatalog
from services.service import SessionService

# Prometheus' own limit; a turn waits for the catalog up to 20 seconds.
SCRAPE_SECONDS = 10.0
PEPPER = b"0123456789abcdef"
KEY = make_key()
REQUESTS = (
    ("GET", "/readyz"),
    ("GET", "/v1/sessions"),
    ("POST", "/v1/sessions"),
    ("POST", "/v1/conversations"),
)


@pytest.fixture
async def server(redis_process: Callable[..., Any]) -> Any:
    return redis_process()


@pytest.fixture(params=[True, False], ids=["open", "with keys"])
async def http(
    request: pytest.FixtureRequest, server: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway over a catalog in Redis, whose scrapes and requests all ask it."""
    monkeypatch.setattr(status, "_COUNT_SECONDS", 0.0)
    catalog = await RedisCatalog.open(redis_client(server.url), uuid4().hex)
    policy = AccessPolicy(open=request.param, pepper=PEPPER, cache_seconds=0.01)
    if not policy.open:
        digest, pepper = digest_key(KEY, PEPPER), get_pepper_id(PEPPER)
        record = KeyRecord(KEY.id, digest, pepper, "ann", "", tuple(Scope), time.time())
        await catalog.api_keys.add(record)
    access = AccessControl(catalog.api_keys, policy)
    service = SessionService(StubWorker(), catalog, ServiceLimits(), access)
    app = create_app(service, GatewaySettings())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        own = {"Authorization": f"Bearer {KEY.text}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://kvrecall", headers=own
        ) as client:
            try:
                yield client
            finally:
                server.signal(signal.SIGCONT)


async def test_metrics_are_answered_within_a_scrape(http: httpx.AsyncClient, server: Any) -> None:
    assert (await http.post("/v1/sessions", json={"budget": 64})).status_code == 201
    before = (await http.get("/metrics")).text
    assert "kvrecall_catalog_up 1.0" in before
    server.signal(signal.SIGSTOP)
    async with asyncio.timeout(SCRAPE_SECONDS):
        silent = await http.get("/metrics")
    assert silent.status_code == 200
    assert "kvrecall_catalog_up 0.0" in silent.text
    assert 'kvrecall_sessions{state="idle"} 1.0' in silent.text, "as it was known before"
    server.signal(signal.SIGCONT)
    async with asyncio.timeout(60):
        while "kvrecall_catalog_up 1.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("http", [False], indirect=True)
async def test_who_is_not_known_gets_no_metrics(http: httpx.AsyncClient, server: Any) -> None:
    assert (await http.get("/metrics")).status_code == 200
    server.signal(signal.SIGSTOP)
    other = {"Authorization": f"Bearer {make_key().text}"}
    wrong = {"Authorization": f"Bearer {KEY.text[:-4]}0000"}
    async with asyncio.timeout(SCRAPE_SECONDS):
        answers = await asyncio.gather(
            http.get("/metrics", headers=other), http.get("/metrics", headers=wrong)
        )
    assert [each.status_code for each in answers] == [503, 401]


async def test_an_outage_is_logged_at_its_begin_and_its_end_whatever_is_asked(
    redis_process: Callable[..., Any],
) -> None:
    """Balancers ask all the time, and so do clients that try again."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    server = redis_process("appendonly yes", "appendfsync always")
    catalog = await RedisCatalog.open(
        redis_client(server.url), uuid4().hex, timeout_seconds=1.0, patience_seconds=0.1
    )
    service = SessionService(StubWorker(), catalog, ServiceLimits())
    app = create_app(service, GatewaySettings())
    transport = httpx.ASGITransport(app)
    with capture_logs() as logs:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://kvrecall") as client,
        ):
            for _ in range(2):
                server.kill()
                for _ in range(3):
                    for method, path in REQUESTS:
                        answer = await client.request(method, path, json={})
                        assert answer.status_code == 503, path
                await asyncio.to_thread(server.start)
                assert (await client.get("/readyz")).status_code == 200
    events = [each["event"] for each in logs if each["event"].startswith("catalog ")]
    assert events == ["catalog failed", "catalog answers again"] * 2
