"""Sessions and turns in a catalog: an acknowledged commit is stored whole, whatever happens."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrecall.domain.errors import (
    CatalogError,
    IdempotencyConflict,
    InvalidRequest,
    StaleEpoch,
    UnknownCall,
    UnknownSession,
)
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.reselection import Reselection
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.tool_calls import CallStatus
from services.catalog.base import Catalog
from services.catalog.records import (
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    RepairCommit,
    SessionDump,
    TurnCommit,
)

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


async def test_a_session_is_read_as_it_was_stored(
    catalog: Catalog, make_session: MakeSession
) -> None:
    session = make_session(
        "s",
        seed=2**63,
        tools=('{"x": 1}',),
        metadata={"user": "é\0"},
        repair_on=frozenset({RepairTrigger.TURN}),
        reselect=Reselection(every=8, first=4, token_share=0.25),
        cache_salt="é\0",
    )
    await catalog.sessions.create(session, b"\0state", None)
    assert await catalog.sessions.get("s") == session
    assert await catalog.sessions.get_worker_state("s") == b"\0state"


async def test_a_turn_is_read_as_it_was_committed(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn, memory: MemoryReport
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    await catalog.turns.commit(make_turn("s", 2), 1, None)
    assert await catalog.turns.get_after("s", 0, 10) == [
        make_turn("s", 1).turn,
        make_turn("s", 2).turn,
    ]
    assert await catalog.turns.get_after("s", 1, 10) == [make_turn("s", 2).turn]
    session = await catalog.sessions.get("s")
    assert (session.turns, session.memory, session.committed_state) == (
        2,
        memory,
        SessionState.IDLE,
    )
    assert await catalog.sessions.get_worker_state("s") == b"state 2"


async def test_token_ids_of_all_turns_are_read_in_order(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    assert await catalog.turns.get_token_ids("s") == ()
    for number in (1, 2):
        await catalog.turns.commit(make_turn("s", number), 1, None)
    assert await catalog.turns.get_token_ids("s") == (1, 2, 2**32 - 1) * 2
    with pytest.raises(UnknownSession):
        await catalog.turns.get_token_ids("x")


async def test_a_session_cannot_be_written_under_an_old_epoch(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    session = await catalog.sessions.get("s")
    assert await catalog.leases.take_over("s", "w") == 2
    with pytest.raises(StaleEpoch):
        await catalog.turns.commit(make_turn("s", 2), 1, None)
    with pytest.raises(StaleEpoch):
        await catalog.repairs.commit("s", RepairCommit(due_repairs(session)[0], b"x"), 1)
    with pytest.raises(StaleEpoch):
        await catalog.tool_calls.commit("s", replace(session.calls[0], started=True), 1, None)
    assert await catalog.sessions.get("s") == replace(session, epoch=2, worker="w")
    assert await catalog.sessions.get_worker_state("s") == b"state 1"


async def test_a_failed_commit_leaves_nothing(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    with pytest.raises(CatalogError):
        await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    session = await catalog.sessions.get("s")
    assert (session.turns, session.calls) == (1, ())
    await catalog.turns.commit(make_turn("s", 2), 1, None)


async def test_unknown_sessions_and_calls_are_refused(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    for attempt in (
        catalog.sessions.get("x"),
        catalog.sessions.get_worker_state("x"),
        catalog.leases.take_over("x", "w"),
        catalog.sessions.delete("x", None),
        catalog.turns.commit(make_turn("x", 1), 1, None),
    ):
        with pytest.raises(UnknownSession):
            await attempt
    await catalog.sessions.create(make_session("s"), b"", None)
    with pytest.raises(UnknownCall):
        await catalog.tool_calls.get("s", "x")


async def test_pages_show_every_session_once_newest_first(
    catalog: Catalog, make_session: MakeSession
) -> None:
    for number in range(7):
        await catalog.sessions.create(
            make_session(f"s{number}", created=float(number // 2)), b"", None
        )
    seen = []
    cursor = None
    while True:
        page = await catalog.sessions.get_page(3, cursor)
        seen += [session.id for session in page.sessions]
        cursor = page.next_cursor
        if cursor is None:
            break
        await catalog.sessions.create(make_session(f"late{len(seen)}", created=100.0), b"", None)
    assert seen == ["s6", "s5", "s4", "s3", "s2", "s1", "s0"]


@pytest.mark.parametrize(
    "cursor", ["", "x", "é", "W10=", "WzEsIDJd", "WyJhIiwgImIiXQ==", "bnVsbA=="]
)
async def test_an_invalid_cursor_is_refused(catalog: Catalog, cursor: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await catalog.sessions.get_page(3, cursor)
    assert caught.value.details["field"] == "cursor"


async def test_a_stored_response_is_returned_for_the_same_key_and_body_only(
    catalog: Catalog, make_session: MakeSession
) -> None:
    key = IdempotencyKey("POST /x", "k", "body")
    assert await catalog.idempotency.get(key) is None
    await catalog.sessions.create(make_session("s"), b"", IdempotencyRecord(key, "answer"))
    assert await catalog.idempotency.get(key) == "answer"
    assert await catalog.idempotency.get(replace(key, scope="POST /y")) is None
    with pytest.raises(IdempotencyConflict):
        await catalog.idempotency.get(replace(key, fingerprint="other"))


async def test_of_creations_under_one_key_at_once_one_succeeds(
    catalog: Catalog, make_session
) -> None:
    key = IdempotencyKey("POST /v1/sessions", "key", "body")
    creations = [
        catalog.sessions.create(make_session(id), b"", IdempotencyRecord(key, id))
        for id in ("a", "b", "c", "d")
    ]
    results = await asyncio.gather(*creations, return_exceptions=True)
    assert sorted(type(each).__name__ for each in results) == ["CatalogError"] * 3 + ["NoneType"]
    (created,) = await catalog.sessions.get_ids()
    assert await catalog.idempotency.get(key) == created


async def test_a_cancelled_commit_is_stored_whole_or_not_at_all(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    for number in range(1, 12):
        task = asyncio.create_task(catalog.turns.commit(make_turn("s", number, *calls), 1, None))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        session = await catalog.sessions.get("s")
        if session.turns < number:
            await catalog.turns.commit(make_turn("s", number, *calls), 1, None)
            session = await catalog.sessions.get("s")
        assert (session.turns, len(session.calls)) == (number, 2)
        assert await catalog.sessions.get_worker_state("s") == b"state %d" % number


async def test_concurrent_commits_are_all_stored(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    ids = [f"s{number}" for number in range(6)]
    await asyncio.gather(*(catalog.sessions.create(make_session(id), b"", None) for id in ids))

    async def talk(id: str) -> None:
        for number in range(1, 6):
            await catalog.turns.commit(make_turn(id, number, *calls), 1, None)
            pending = (await catalog.sessions.get(id)).calls
            reported = [
                replace(call, status=CallStatus.COMPLETED, result=f"{id} {number}", batch=1)
                for call in pending
            ]
            repairs = [RepairCommit(due) for due in due_repairs(await catalog.sessions.get(id))]
            await asyncio.gather(
                *(catalog.tool_calls.commit(id, call, 1, None) for call in reported),
                *(catalog.repairs.commit(id, repair, 1) for repair in repairs),
            )

    await asyncio.gather(*map(talk, ids))
    for id in ids:
        session = await catalog.sessions.get(id)
        assert [turn.number for turn in await catalog.turns.get_after(id, 0, 9)] == [1, 2, 3, 4, 5]
        assert [call.result for call in session.calls] == [f"{id} 5"] * 2
        assert [call.call_signal for call in session.calls] == [call.signal for call in calls]
    assert sorted(await catalog.sessions.get_ids()) == ids


async def test_a_tenant_lists_its_own_sessions_only(
    catalog: Catalog, make_session: MakeSession
) -> None:
    for number in range(4):
        await catalog.sessions.create(
            make_session(f"s{number}", tenant="ab"[number % 2]), b"", None
        )
    page = await catalog.sessions.get_page(1, None, "a")
    assert [session.id for session in page.sessions] == ["s2"]
    last = await catalog.sessions.get_page(5, page.next_cursor, "a")
    assert ([session.id for session in last.sessions], last.next_cursor) == (["s0"], None)
    assert (await catalog.sessions.get_page(5, None)).sessions == ()
    assert await catalog.sessions.get_ids() == ["s0", "s1", "s2", "s3"]


async def test_the_response_of_a_turn_is_stored_with_the_turn(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    key = IdempotencyKey("POST /sessions/s/turns", "k", "body", session="s")
    with pytest.raises(StaleEpoch):
        await catalog.turns.commit(make_turn("s", 1), 7, IdempotencyRecord(key, "early"))
    assert await catalog.idempotency.get(key) is None
    await catalog.turns.commit(make_turn("s", 1), 1, IdempotencyRecord(key, "first"))
    assert await catalog.idempotency.get(key) == "first"
    with pytest.raises(CatalogError):
        await catalog.turns.commit(make_turn("s", 2), 1, IdempotencyRecord(key, "second"))
    assert (await catalog.idempotency.get(key), (await catalog.sessions.get("s")).turns) == (
        "first",
        1,
    )


async def test_a_restored_session_is_as_it_was_in_the_other_catalog(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    repair: RepairReport,
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    await catalog.turns.commit(
        replace(make_turn("s", 2, calls[0]), inline_results={"a": "r", "b": "q"}), 1, None
    )
    due = due_repairs(await catalog.sessions.get("s"))
    await catalog.repairs.commit("s", RepairCommit(due[0], b"repaired", repair), 1)
    session = await catalog.sessions.get("s")
    repairs = await catalog.repairs.get_latest("s", 9)
    known = [await catalog.tool_calls.get("s", "b"), *session.calls]
    turns = await catalog.turns.get_after("s", 0, 9)
    dump = SessionDump(session, b"state", tuple(turns), tuple(known), tuple(reversed(repairs)))
    with pytest.raises(CatalogError, match="already"):
        await catalog.sessions.restore(dump)
    await catalog.sessions.delete("s", None)
    other = replace(session, id="t")
    await catalog.sessions.restore(
        replace(dump, session=other, turns=tuple(replace(turn, session="t") for turn in turns))
    )
    assert await catalog.sessions.get("t") == other
    assert await catalog.sessions.get_worker_state("t") == b"state"
    assert await catalog.turns.get_after("t", 0, 9) == [
        replace(turn, session="t") for turn in turns
    ]
    assert await catalog.repairs.get_latest("t", 9) == repairs
    assert [await catalog.tool_calls.get("t", "b"), await catalog.tool_calls.get("t", "a")] == known
    assert (await catalog.sessions.get_use("")).tokens == session.memory.length


async def test_a_tenant_s_tokens_are_those_of_its_sessions(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    for id, tenant in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
        await catalog.sessions.create(make_session(id, tenant=tenant), b"", None)
    for id in ("a", "b", "c"):
        await catalog.turns.commit(make_turn(id, 1), 1, None)
    child = replace(await catalog.sessions.get("b"), id="e")
    await catalog.sessions.fork(ForkCommit(child, "b", 1, b""), None)
    assert [(await catalog.sessions.get_use(tenant)).tokens for tenant in ("x", "y", "", "z")] == [
        21,
        7,
        0,
        0,
    ]
    await catalog.sessions.delete("a", None)
    assert [(await catalog.sessions.get_use(tenant)).tokens for tenant in ("x", "y")] == [14, 7]


async def test_the_response_of_a_request_that_created_a_session_is_deleted_with_it(
    catalog: Catalog, make_session: MakeSession
) -> None:
    key = IdempotencyKey("POST /sessions", "k", "body")
    await catalog.sessions.create(make_session("s"), b"", IdempotencyRecord(key, "s"))
    assert await catalog.idempotency.get(key) == "s"
    removal = IdempotencyKey("DELETE /sessions/s", "k", "", session="s")
    await catalog.sessions.delete("s", IdempotencyRecord(removal, "gone"))
    assert await catalog.idempotency.get(key) is None
    assert await catalog.idempotency.get(removal) == "gone"
    await catalog.sessions.create(make_session("t"), b"", IdempotencyRecord(key, "t"))
    assert await catalog.idempotency.get(key) == "t"
