"""Requests that there is no room for: refused before their bodies are read."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvrecall.domain.errors import Overloaded
from kvrecall.domain.limits import ServiceLimits

CHAT = "/v1/chat/completions"


@pytest.fixture
def service_settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, max_running_turns=4, max_waiting_turns=4)


@pytest.fixture
def halted(api: Any) -> Iterator[asyncio.Event]:
    """A worker that gives no token before the event is set."""
    gate = api.worker.gates["token"] = asyncio.Event()
    yield gate
    gate.set()


async def ask(api: Any, tenant: str, text: str) -> Any:
    body = {"model": api.service.info.model, "messages": [{"role": "user", "content": text}]}
    return await api.http.post(CHAT, json=body, headers={"X-Kvrecall-Tenant": tenant})


async def test_a_tenant_without_room_is_refused_before_its_body_is_read(
    api: Any, halted: asyncio.Event
) -> None:
    flood: list[asyncio.Task[Any]] = []
    with suppress(Overloaded):
        while True:
            api.service.check_room("mallory")
            flood.append(asyncio.create_task(ask(api, "mallory", f"flood {len(flood)}")))
            await asyncio.sleep(0.05)
    headers = {"X-Kvrecall-Tenant": "mallory", "content-type": "application/json"}
    refused = await api.http.post(CHAT, content=b"{ no JSON", headers=headers)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    again = {**headers, "Idempotency-Key": "one"}  # it may have been answered
    assert (await api.http.post(CHAT, content=b"{ no JSON", headers=again)).status_code == 400
    assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
    waiting = asyncio.create_task(ask(api, "ann", "hello"))
    halted.set()
    assert (await waiting).status_code == 200
    for each in await asyncio.gather(*flood):
        assert each.status_code in (200, 429)
