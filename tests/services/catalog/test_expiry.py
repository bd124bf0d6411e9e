"""Sessions that are deleted after a time without a turn, in every catalog."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings import session as session_settings
from kvrecall_server.app.redis import redis_client
from services.catalog.base import Catalog
from services.catalog.records import ForkCommit, TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.redis.connection.keys import Keys

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
SOON = 0.02
LATER = 1000.0


def get_ids(sessions: list[Session]) -> list[str]:
    return [session.id for session in sessions]


async def test_sessions_expire_in_the_order_of_their_lifetimes_those_without_one_never(
    catalog: Catalog, make_session: MakeSession
) -> None:
    for id, lifetime, tenant in (
        ("never", None, "ann"),
        ("later", LATER, "ann"),
        ("soon", SOON, "ann"),
        ("of ben", LATER, "ben"),
    ):
        session = make_session(id, expires_after_seconds=lifetime, tenant=tenant)
        await catalog.sessions.create(session, b"", None)
    await asyncio.sleep(2 * SOON)
    assert get_ids(await catalog.expiry.get_expired(9)) == ["soon"]
    assert get_ids(await catalog.expiry.get_next("ann", 9)) == ["soon", "later"]
    assert get_ids(await catalog.expiry.get_next("ann", 1)) == ["soon"]
    assert get_ids(await catalog.expiry.get_next("ben", 9)) == ["of ben"]
    assert await catalog.expiry.get_next("nobody", 9) == []


async def test_no_more_expired_sessions_are_returned_than_asked_for(
    catalog: Catalog, make_session: MakeSession
) -> None:
    for number in range(5):
        session = make_session(f"s{number}", expires_after_seconds=0.0, tenant=f"t{number % 2}")
        await catalog.sessions.create(session, b"", None)
    assert len(await catalog.expiry.get_expired(3)) == 3
    assert sorted(get_ids(await catalog.expiry.get_expired(9))) == [f"s{n}" for n in range(5)]


async def test_a_turn_begins_the_time_anew(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_settings, "ONE_SHOT_SECONDS", 0.0)
    for id, lifetime in (("renewed", LATER), ("expired", 0.0)):
        session = make_session(id, expires_after_seconds=lifetime, matched=True)
        await catalog.sessions.create(session, b"", None)
        for turn in (1, 2):
            renewed = session.settings.get_lifetime(turn)
            await catalog.turns.commit(replace(make_turn(id, turn), lifetime=renewed), 1, None)
            if turn == 1:
                assert id in get_ids(await catalog.expiry.get_expired(9))
    assert get_ids(await catalog.expiry.get_expired(9)) == ["expired"]
    assert get_ids(await catalog.expiry.get_next("", 9)) == ["expired", "renewed"]


async def test_a_deleted_session_does_not_expire(
    catalog: Catalog, make_session: MakeSession
) -> None:
    await catalog.sessions.create(make_session("s", expires_after_seconds=0.0), b"", None)
    await catalog.sessions.delete("s", None)
    assert await catalog.expiry.get_expired(9) == []
    assert await catalog.expiry.get_next("", 9) == []


async def test_a_fork_expires_by_itself(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("parent", expires_after_seconds=LATER), b"", None)
    await catalog.turns.commit(replace(make_turn("parent", 1), lifetime=LATER), 1, None)
    child = replace(make_session("child", expires_after_seconds=0.0), turns=1)
    await catalog.sessions.fork(ForkCommit(child, "parent", 1, b"state"), None)
    assert get_ids(await catalog.expiry.get_expired(9)) == ["child"]


class TestRedis:
    """Entries lie in another slot than their sessions, so one may be old."""

    async def test_a_session_whose_last_turn_is_later_than_its_entry_has_not_expired(
        self,
        redis_url: str,
        open_catalog: Callable[..., Awaitable[RedisCatalog]],
        make_session: MakeSession,
        make_turn: MakeTurn,
    ) -> None:
        namespace = uuid4().hex
        catalog = await open_catalog(redis_url, namespace)
        for id in ("renewed", "expired"):
            lifetime = LATER if id == "renewed" else 0.0
            session = make_session(id, expires_after_seconds=lifetime, tenant="an n")
            await catalog.sessions.create(session, b"", None)
            await catalog.turns.commit(replace(make_turn(id, 1), lifetime=lifetime), 1, None)
        keys = Keys(namespace)
        places = {keys.expiring: "an%20n {}", keys.get_expiring("an n"): "{}"}
        server: Any = redis_client(redis_url, 1.0)
        try:
            now = time.time()
            for name, member in places.items():
                old = {"renewed": 1.0, "left by a crash": 1.0, "being created": now}
                await server.zadd(name, {member.format(id): at for id, at in old.items()})
            # One at a time: what is wrong or may still come is in no one's way.
            assert get_ids(await catalog.expiry.get_expired(1)) == ["expired"]
            listed = [await server.zrange(name, 0, -1, withscores=True) for name in places]
        finally:
            await server.aclose()
        at = (await catalog.sessions.get("renewed")).updated_at + LATER
        for entries, member in zip(listed, places.values(), strict=True):
            ids = [member.format(id).encode() for id in ("expired", "being created", "renewed")]
            assert sorted(entry for entry, _ in entries) == sorted(ids)
            assert dict(entries)[ids[-1]] == at
