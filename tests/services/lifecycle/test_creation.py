"""Creations of sessions do not wait for each other, and are bounded."""

import asyncio
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError, Overloaded
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.sessions.request import CreateSession
from services.catalog.records import IdempotencyKey

KEY = IdempotencyKey("POST /v1/sessions", "key", "body")


def hold_first_open(harness: Any) -> asyncio.Event:
    """Make the worker's next open wait for the event."""
    gate = asyncio.Event()
    opens = harness.worker.open
    calls = 0

    async def open_slowly(request: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            await gate.wait()
        return await opens(request)

    harness.worker.open = open_slowly
    return gate


async def test_a_slow_open_holds_up_no_other_creation(harness) -> None:
    gate = hold_first_open(harness)
    slow = asyncio.create_task(harness.session(tenant="a"))
    others = [asyncio.create_task(harness.session(tenant=f"t{number}")) for number in range(30)]
    await asyncio.wait_for(asyncio.gather(*others), 30)
    assert not slow.done()
    gate.set()
    await slow


async def test_two_requests_with_one_key_create_one_session(harness) -> None:
    gate = hold_first_open(harness)
    request = CreateSession(budget=64, repair_rows=8)
    first = asyncio.create_task(harness.service.create(request, KEY))
    second = asyncio.create_task(harness.service.create(request, KEY))
    await asyncio.wait_for(second, 30)
    gate.set()
    assert await first == await second
    assert await harness.catalog.sessions.get_ids() == [first.result().id]


class TestCrowded:
    """A service that creates one session at a time, with one more waiting."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(max_running_creations=1, max_waiting_creations=1, queue_seconds=0.2)

    async def test_a_creation_over_the_limit_is_refused(self, harness) -> None:
        gate = hold_first_open(harness)
        running = asyncio.create_task(harness.session())
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(harness.session())
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="1 creations run and 1 wait"):
            await harness.session()
        with pytest.raises(Overloaded, match=r"within 0\.2 seconds"):
            await waiting
        gate.set()
        await running


@pytest.mark.parametrize("key", [KEY, None], ids=["with a key", "without"])
async def test_a_session_is_created_though_one_of_the_same_request_came_first_and_is_gone(
    harness: Any, monkeypatch: pytest.MonkeyPatch, key: IdempotencyKey | None
) -> None:
    create = harness.catalog.sessions.create
    refusals = [CatalogError("a record of this key is there")]

    async def refuse_once(*arguments: Any) -> None:
        if refusals:
            raise refusals.pop()
        await create(*arguments)

    monkeypatch.setattr(harness.catalog.sessions, "create", refuse_once)
    creating = harness.service.create(CreateSession(budget=30, method="snapkv"), key)
    if key is None:
        with pytest.raises(CatalogError):
            await creating
    else:
        created = await creating
        assert await harness.catalog.sessions.get_ids() == [created.id]
