"""Forks.

The child begins as its parent stood, both go on by themselves, and neither loses rows when the
other ends.
"""

import asyncio
from typing import Any

import pytest

from kvrecall.domain.errors import (
    CatalogError,
    IdempotencyConflict,
    SessionBusy,
    UnknownSession,
    UnknownTurn,
    WorkerLost,
)
from kvrecall.domain.events import SessionForked
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.session import ForkOrigin
from kvrecall.domain.turn_request import TurnRequest
from services.catalog.records import IdempotencyKey
from services.lifecycle.forks import ForkRequest
from tests.services.lifecycle.forking import HELLO, KEY, LONG, fork, spoken


async def test_a_fork_begins_as_its_parent_stands_and_both_go_on_by_themselves(harness) -> None:
    parent = await spoken(harness)
    child = await harness.service.fork(parent, ForkRequest())
    assert (child.turns, child.memory.length, child.settings.forked_from) == (
        2,
        22,
        ForkOrigin(parent, 2),
    )
    assert (await harness.service.get(child.id))[0] == child
    assert await harness.selection(child.id) == await harness.selection(parent)
    told = [
        (turn.number, turn.messages, turn.token_ids)
        for turn in await harness.service.turns(child.id, 0, 10)
    ]
    assert told == [
        (turn.number, turn.messages, turn.token_ids)
        for turn in await harness.service.turns(parent, 0, 10)
    ]
    assert (await harness.say(child.id, HELLO)).turn == 3
    assert (await harness.service.get(parent))[0].turns == 2
    assert await harness.selection(child.id) != await harness.selection(parent)
    await harness.say(parent, HELLO)
    assert await harness.selection(child.id) == await harness.selection(parent)
    assert harness.worker.call_log == ["open 0", "open 22"]


async def test_a_fork_has_its_parents_settings_and_metadata_of_its_own(harness) -> None:
    parent = await harness.session(metadata={"name": "first"}, seed=7, method="full")
    await harness.say(parent, HELLO)
    named = await harness.service.fork(parent, ForkRequest(metadata={"name": "second"}))
    assert (named.settings.metadata, named.settings.seed, named.settings.method) == (
        {"name": "second"},
        7,
        "full",
    )
    assert (await harness.service.fork(parent, ForkRequest())).settings.metadata == {
        "name": "first"
    }


async def test_a_fork_has_the_pages_that_its_parent_had_then(harness) -> None:
    parent = await spoken(harness)
    pages = await harness.get_pages(parent)
    child = await fork(harness, parent)
    assert await harness.get_pages(child) == pages
    await harness.say(child, LONG)
    assert (await harness.get_pages(child))[:5] == pages
    assert await harness.get_pages(parent) == pages
    grandchild = await fork(harness, child)
    assert await harness.get_pages(grandchild) == await harness.get_pages(child)
    early = await fork(harness, grandchild, 1)
    assert await harness.get_pages(early) == pages[:2]
    middle = await fork(harness, grandchild, 2)
    assert await harness.get_pages(middle) == pages


async def test_a_fork_is_opened_with_its_pages_after_a_restart(harness) -> None:
    parent = await spoken(harness)
    child = await fork(harness, parent)
    await harness.crash()
    await harness.say(child, HELLO)
    await harness.say(parent, HELLO)
    assert await harness.get_pages(child) == await harness.get_pages(parent)
    assert await harness.selection(child) == await harness.selection(parent)


async def test_a_fork_is_opened_where_its_parent_is(harness) -> None:
    harness.worker.names = ["one", "two"]
    harness.worker.draining = {"one"}
    parent = await spoken(harness)
    harness.worker.draining = set()
    assert (await harness.service.fork(parent, ForkRequest())).worker == "two"
    harness.worker.draining = {"two"}
    assert (await harness.service.fork(parent, ForkRequest())).worker == "one"


async def test_a_fork_where_a_tool_was_asked_for_may_be_told_another_result(harness, call) -> None:
    parent = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    await harness.say(parent, HELLO)
    await harness.wait_until_idle(parent)
    await harness.say(parent, Message("tool", "sunny", tool_call_id="c1"))
    child = await harness.service.fork(parent, ForkRequest(1))
    assert child.committed_state is SessionState.PAUSED
    assert [pending.call.id for pending in (await harness.service.get(child.id))[0].calls] == ["c1"]
    await harness.say(child.id, Message("tool", "rain", tool_call_id="c1"))
    (_, told) = await harness.service.turns(child.id, 0, 10)
    assert told.messages[0].content == "rain"


async def test_a_fork_of_a_paused_session_waits_for_the_same_calls(harness, call) -> None:
    parent = await harness.session()
    harness.worker.script = [[call("c1", "Bern"), call("c2", "Basel")]]
    await harness.say(parent, HELLO)
    await harness.wait_until_idle(parent)
    child = await harness.service.fork(parent, ForkRequest())
    assert [pending.call.id for pending in child.calls] == ["c1", "c2"]
    assert (await harness.service.get(child.id))[1] is SessionState.PAUSED
    assert [
        record.report.trigger for record in await harness.catalog.repairs.get_latest(child.id, 9)
    ] == ["tool_call"] * 2


async def test_a_repair_that_runs_ends_with_what_it_has_found_and_the_fork_has_it(
    harness, call
) -> None:
    parent = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.say(parent, HELLO)
    await harness.worker.reached["repair"].wait()
    child = await fork(harness, parent)
    assert [repair.truncated for repair in (await harness.service.get(parent))[0].repairs] == [True]
    assert await harness.selection(child) == await harness.selection(parent)


@pytest.mark.parametrize("turn", [0, 3])
async def test_there_is_no_fork_at_a_turn_that_was_not_said(harness, turn: int) -> None:
    session = await spoken(harness)
    with pytest.raises(UnknownTurn) as caught:
        await harness.service.fork(session, ForkRequest(turn))
    assert caught.value.details == {"session": session, "turn": turn}
    assert harness.worker.call_log == ["open 0"]


async def test_a_session_that_said_nothing_is_not_forked(harness) -> None:
    with pytest.raises(UnknownTurn):
        await harness.service.fork(await harness.session(), ForkRequest())
    with pytest.raises(UnknownSession):
        await harness.service.fork("s_none", ForkRequest())


async def test_a_session_in_the_middle_of_a_turn_is_not_forked_unless_asked_to_wait(
    harness,
) -> None:
    session = await spoken(harness)
    harness.worker.gates["token"] = asyncio.Event()
    harness.worker.reached["token"].clear()
    stream = harness.service.turn(session, TurnRequest((HELLO,), sampling=Sampling(50)))
    await harness.worker.reached["token"].wait()
    with pytest.raises(SessionBusy):
        await harness.service.fork(session, ForkRequest())
    waiting = asyncio.create_task(harness.service.fork(session, ForkRequest(queue=True)))
    await asyncio.sleep(0)
    harness.worker.gates["token"].set()
    assert (await waiting).turns == 3
    assert [progress async for progress in stream][-1].outcome.turn == 3


async def test_a_fork_that_cannot_be_committed_leaves_nothing_behind(harness) -> None:
    session = await spoken(harness)
    commit = harness.catalog.sessions.fork

    async def full_disk(*args: object) -> None:
        raise CatalogError("no space left")

    harness.catalog.sessions.fork = full_disk
    with pytest.raises(CatalogError):
        await harness.service.fork(session, ForkRequest())
    harness.catalog.sessions.fork = commit
    assert list(harness.worker.sessions) == [session]
    assert await harness.catalog.sessions.get_ids() == [session]


async def test_a_fork_that_its_worker_loses_stands_and_is_opened_by_its_next_turn(harness) -> None:
    session = await spoken(harness)
    harness.worker.faults["open"] = WorkerLost("gone")
    child = await fork(harness, session)
    assert set(await harness.catalog.sessions.get_ids()) == {session, child}
    assert (await harness.say(child, HELLO)).turn == 3
    await harness.say(session, HELLO)
    assert await harness.selection(child) == await harness.selection(session)


async def test_a_fork_is_in_the_catalog_before_the_worker_opens_it(harness) -> None:
    session = await spoken(harness)
    known: list[set[str]] = []
    opens = harness.worker.open

    async def open_in_worker(request: Any) -> Any:
        known.append(set(await harness.catalog.sessions.get_ids()))
        return await opens(request)

    harness.worker.open = open_in_worker
    assert await fork(harness, session) in known[0], (
        "a gateway killed now leaves no unknown session"
    )


async def test_a_repeated_fork_is_made_once(harness) -> None:
    session = await spoken(harness)
    first = await harness.service.fork(session, ForkRequest(), KEY)
    await harness.say(session, HELLO)
    assert await harness.service.fork(session, ForkRequest(), KEY) == first
    assert len(await harness.catalog.sessions.get_ids()) == 2
    with pytest.raises(IdempotencyConflict):
        await harness.service.fork(
            session, ForkRequest(), IdempotencyKey("fork", "key", "another body")
        )


async def test_a_deleted_parent_leaves_the_pages_that_its_forks_have(harness) -> None:
    parent = await spoken(harness)
    child = await fork(harness, parent)
    other = await fork(harness, parent, 1)
    pages = await harness.get_pages(parent)
    await harness.say(parent, LONG)
    await harness.service.delete(parent)
    await harness.collect()
    with pytest.raises(UnknownSession):
        await harness.service.get(parent)
    await harness.crash()
    await harness.collect()
    assert harness.worker.pages.keys() == {*pages}
    assert (await harness.say(child, HELLO)).turn == 3
    await harness.service.delete(child)
    await harness.collect()
    assert harness.worker.pages.keys() == {*pages[:2]} == {*await harness.get_pages(other)}
    await harness.service.delete(other)
    await harness.collect()
    assert not harness.worker.pages


async def test_who_watches_is_told_of_forks(harness) -> None:
    session = await spoken(harness)
    told: list[object] = []
    harness.service.observe(told.append)
    last = await fork(harness, session)
    earlier = await fork(harness, session, 1)
    forks = [
        (each.session, each.child, each.at) for each in told if isinstance(each, SessionForked)
    ]
    assert forks == [(session, last, "last"), (session, earlier, "earlier")]
