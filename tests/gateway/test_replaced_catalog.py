"""Requests while the catalog's Redis is empty: a 503 that says so, at every door; then all goes on."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx

from gateway.app import create_app
from gateway.http.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits
from kvrecall_server.app.redis import redis_client
from kvrecall_server.testing import StubWorker
from services.catalog.redis.catalog import RedisCatalog
from services.service import SessionService


async def test_creations_and_readiness_are_refused_until_the_data_are_back(
    redis_process: Callable[[], Any],
) -> None:
    server = redis_process()
    catalog = await RedisCatalog.open(redis_client(server.url), uuid4().hex)
    service = SessionService(StubWorker(), catalog, ServiceLimits(drain_seconds=5))
    await service.start()
    transport = httpx.ASGITransport(create_app(service, GatewaySettings()))
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
    async with client:
        assert (await client.get("/readyz")).status_code == 200
        saved = {key: server.client.dump(key) for key in server.client.keys("*")}
        server.client.flushall()
        for answer in (
            await client.get("/readyz"),
            await client.post("/v1/sessions", json={"budget": 64}),
        ):
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (503, "catalog_replaced")
            assert "until the operator has brought them back" in problem["detail"]
            assert catalog.id not in answer.text
        conversation = await client.post("/v1/conversations", json={})
        assert conversation.status_code == 503
        assert not server.client.keys("*")
        for key, value in saved.items():
            server.client.restore(key, 0, value)
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/v1/sessions", json={"budget": 64})).status_code == 201
    await service.stop()
