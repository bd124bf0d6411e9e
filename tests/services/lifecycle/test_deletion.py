"""Deletion of sessions that have expired, and of those that are in the way."""

import asyncio
from dataclasses import replace

import pytest

from kvrecall.domain.errors import DataKeyDeleted, QuotaExceeded, UnknownSession
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session
from services.background import BackgroundTasks
from services.context import ServiceContext
from services.lifecycle.deletion import Retention, SessionDeleter

HELLO = Message("user", "hello there")


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, drain_seconds=5, tenant_sessions=3)


@pytest.fixture
def retention(harness) -> Retention:
    """The service's own mechanism, which sweeps when it is asked to."""
    context = ServiceContext.create(harness.catalog, harness.worker, harness.settings)
    background = BackgroundTasks(context)
    return Retention(context, SessionDeleter(context, background, harness.build_collector()))


async def exists(harness, id: str) -> bool:
    try:
        await harness.service.get(id)
    except UnknownSession:
        return False
    return True


async def test_a_sweep_deletes_what_has_expired_and_its_rows(harness, retention) -> None:
    expired = await harness.session(expires_after_seconds=0.0)
    await harness.say(expired, HELLO)
    kept = [
        await harness.session(expires_after_seconds=1000.0),
        await harness.session(),
    ]
    await retention.sweep()
    assert not await exists(harness, expired)
    assert expired not in harness.worker.sessions
    assert [await exists(harness, each) for each in kept] == [True, True]


async def test_a_session_with_a_running_turn_is_left_to_the_next_sweep(harness, retention) -> None:
    session = await harness.session(expires_after_seconds=0.0)
    harness.worker.gates["token"] = asyncio.Event()
    stream = harness.begin(session, HELLO)
    await anext(stream)
    await retention.sweep()
    assert await exists(harness, session)
    await stream.aclose()


async def test_a_session_with_a_turn_since_it_was_found_is_not_deleted(harness) -> None:
    id = await harness.session(expires_after_seconds=1000.0)
    found: Session = await harness.catalog.sessions.get(id)
    await harness.say(id, HELLO)
    context = ServiceContext.create(harness.catalog, harness.worker, harness.settings)
    deleter = SessionDeleter(context, BackgroundTasks(context), harness.build_collector())
    assert not await deleter.delete_unused(found)
    assert await deleter.delete_unused(await harness.catalog.sessions.get(id))


class TestRoom:
    async def test_sessions_of_stateless_requests_make_room_the_next_to_expire_first(
        self, harness
    ) -> None:
        found = [await harness.session(tenant="ann", matched=True) for _ in range(3)]
        for session in found:
            await harness.say(session, HELLO)
        own = await harness.session(tenant="ann")
        assert not await exists(harness, found[0])
        assert await exists(harness, own)

    async def test_no_session_of_the_session_api_makes_room(self, harness) -> None:
        for _ in range(3):
            await harness.session(tenant="ann", expires_after_seconds=1000.0)
        with pytest.raises(QuotaExceeded):
            await harness.session(tenant="ann")

    async def test_nor_does_another_tenants(self, harness) -> None:
        others = await harness.session(tenant="ben", matched=True)
        for _ in range(3):
            await harness.session(tenant="ann")
        with pytest.raises(QuotaExceeded):
            await harness.session(tenant="ann")
        assert await exists(harness, others)


async def test_a_lone_request_without_tools_goes_sooner(harness) -> None:
    settings = (
        await harness.catalog.sessions.get(
            await harness.session(matched=True, expires_after_seconds=90_000.0)
        )
    ).settings
    assert settings.get_lifetime(1) == 3600.0
    assert settings.get_lifetime(2) == 90_000.0
    assert replace(settings, tools=("{}",)).get_lifetime(1) == 90_000.0
    assert replace(settings, matched=False).get_lifetime(1) == 90_000.0


async def test_a_session_of_a_stored_response_lasts_as_long_and_makes_no_room(
    harness, retention
) -> None:
    request = CreateSession(budget=64, repair_rows=8, matched=True)
    passing, stored = [
        (await harness.service.create(each)).id for each in (request, replace(request, stored=True))
    ]
    for id in (passing, stored):
        await harness.say(id, HELLO)
    lifetimes = [
        (await harness.service.get(id))[0].settings.get_lifetime(1) for id in (passing, stored)
    ]
    assert lifetimes == [3600.0, harness.settings.response_days * 86_400]
    assert await retention.make_room("", "")
    assert [await exists(harness, each) for each in (passing, stored)] == [False, True]
    assert not await retention.make_room("", "")


async def test_a_session_that_nobody_can_read_is_deleted_all_the_same(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await harness.session()

    async def refuse(session_id: str, tenant: str | None = None) -> Session:
        raise DataKeyDeleted

    with monkeypatch.context() as patched:
        patched.setattr(harness.catalog.sessions, "get", refuse)
        with pytest.raises(DataKeyDeleted):
            await harness.service.get(session)
        context = ServiceContext.create(harness.catalog, harness.worker, harness.settings)
        background = BackgroundTasks(context)
        await SessionDeleter(context, background, harness.build_collector()).delete(session)
    assert not await exists(harness, session)
