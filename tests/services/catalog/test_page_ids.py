"""The ids of a session's pages are committed with its state."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrecall.domain.errors import QuotaExceeded, StaleEpoch, UnknownSession
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.quota import TenantLimits
from services.catalog.records import ForkCommit, SessionDump, SettleCommit, TurnCommit

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
IDS = bytes(range(48))


def make_ids(pages: int) -> bytes:
    """The ids of so many pages."""
    return b"".join(page.to_bytes(16, "little") for page in range(1, pages + 1))


async def test_a_session_has_the_page_ids_that_were_committed_last(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    assert await catalog.sessions.get_page_ids("s") == b""
    await catalog.turns.commit(replace(make_turn("s", 1), page_ids=IDS[:16]), 1, None)
    assert await catalog.sessions.get_page_ids("s") == IDS[:16]
    await catalog.turns.commit_settled("s", SettleCommit(b"settled", MemoryReport(), IDS), 1)
    assert await catalog.sessions.get_page_ids("s") == IDS
    assert await catalog.sessions.get_worker_state("s") == b"settled"


async def test_a_former_writer_changes_no_page_id(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.leases.take_over("s", "two")
    with pytest.raises(StaleEpoch):
        await catalog.turns.commit(replace(make_turn("s", 1), page_ids=IDS), 1, None)
    assert await catalog.sessions.get_page_ids("s") == b""


async def test_forks_and_restored_sessions_come_with_their_page_ids(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(replace(make_turn("s", 1), page_ids=IDS), 1, None)
    child = replace(await catalog.sessions.get("s"), id="child")
    await catalog.sessions.fork(ForkCommit(child, "s", 1, b"child", IDS[:32]), None)
    await catalog.sessions.restore(SessionDump(make_session("t"), b"", (), page_ids=IDS[16:]))
    assert await catalog.sessions.get_page_ids("child") == IDS[:32]
    assert await catalog.sessions.get_page_ids("t") == IDS[16:]


async def test_a_session_that_does_not_exist_has_no_page_ids(catalog: Catalog) -> None:
    with pytest.raises(UnknownSession):
        await catalog.sessions.get_page_ids("never")


async def test_page_ids_count_as_stored_bytes(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    settled = SettleCommit(b"", MemoryReport(), make_ids(100))
    before = (await catalog.sessions.get_use("")).bytes
    await catalog.turns.commit_settled("s", settled, 1)
    held = (await catalog.sessions.get_use("")).bytes
    assert held - before in range(1600, 1700)
    turn = replace(make_turn("s", 1), page_ids=make_ids(1 << 16))
    with pytest.raises(QuotaExceeded):
        await catalog.turns.commit(turn, 1, None, TenantLimits(bytes=held + (1 << 20)))
