"""Sessions that remember each other, in every catalog."""

from collections.abc import Callable

from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.records import ForkCommit, SessionDump

MakeSession = Callable[..., Session]


async def get_ids(catalog: Catalog, session: Session, limit: int = 9) -> list[str]:
    """The ids of the sessions of a session's memory."""
    settings = session.settings
    found = await catalog.memories.get_newest(settings.tenant, settings.memory, limit)
    return [each.id for each in found]


async def test_a_memory_has_the_sessions_of_its_name_the_newest_first(
    catalog: Catalog, make_session: MakeSession
) -> None:
    sessions = {
        id: make_session(id, created, remember=name, tenant=tenant, cache_salt=salt)
        for id, created, name, tenant, salt in (
            ("first", 1.0, "ann", "t", ""),
            ("last", 3.0, "ann", "t", ""),
            ("middle", 2.0, "ann", "t", ""),
            ("of another name", 4.0, "ben", "t", ""),
            ("of another tenant", 4.0, "ann", "u", ""),
            ("of another salt", 4.0, "ann", "t", "salt"),
            ("of no memory", 4.0, "", "t", ""),
        )
    }
    for session in sessions.values():
        await catalog.sessions.create(session, b"", None)
    assert await get_ids(catalog, sessions["first"]) == ["last", "middle", "first"]
    assert await get_ids(catalog, sessions["first"], limit=2) == ["last", "middle"]
    for alone in ("of another name", "of another tenant", "of another salt"):
        assert await get_ids(catalog, sessions[alone]) == [alone]


async def test_a_deleted_session_is_in_no_memory(
    catalog: Catalog, make_session: MakeSession
) -> None:
    for id in ("a", "b"):
        await catalog.sessions.create(make_session(id, remember="ann"), b"", None)
    await catalog.sessions.delete("a", None)
    assert await get_ids(catalog, make_session("c", remember="ann")) == ["b"]


async def test_forks_and_restored_sessions_are_in_the_memory_of_their_settings(
    catalog: Catalog, make_session: MakeSession
) -> None:
    await catalog.sessions.create(make_session("a", 1.0, remember="ann"), b"", None)
    child = make_session("b", 2.0, remember="ann")
    await catalog.sessions.fork(ForkCommit(child, "a", 0, b""), None)
    await catalog.sessions.restore(SessionDump(make_session("c", 3.0, remember="ann"), b"", ()))
    assert await get_ids(catalog, child) == ["c", "b", "a"]
