"""Forks: the copied state, and the independence of parent and child."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import UnknownCall, UnknownEpisode, UnknownSession, UnknownTurn
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.tool_calls import CallStatus, PendingCall, ToolOutput
from services.catalog.base import Catalog
from services.catalog.records import (
    BuildCommit,
    EpisodeRecord,
    EpisodeSet,
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    RepairCommit,
    SegmentRecord,
    SegmentsCommit,
    TurnCommit,
)

MakeTurn = Callable[..., TurnCommit]
SEGMENTS = tuple(SegmentRecord(n, 10 * n, 10 * n + 10, b"\0\0\x80?" * 2, 0) for n in range(2))
EPISODE = EpisodeRecord("1-1", b"\0\0\x80?\0\0\0\0", 2, 20, "user: tea", 0)
BUILT = EpisodeSet(2, 2, 1, 20, 3, 1, 2, "1-1", (EPISODE,))


@pytest.fixture
async def parent(
    catalog: Catalog,
    make_session: Callable[..., Session],
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    repair: RepairReport,
    memory: MemoryReport,
) -> Session:
    """Three turns: the second and third ended on calls; of the third, one result and one repair."""
    await catalog.sessions.create(make_session("parent"), b"", None)
    await catalog.episodes.commit_segments(
        "parent", SegmentsCommit(SEGMENTS, replace(BUILT, built_segments=0, episodes=())), 1
    )
    await catalog.episodes.commit_build("parent", BuildCommit(BUILT, (b"built",), (0, 0)), 1)
    await catalog.turns.commit(make_turn("parent", 1), 1, None)
    await catalog.turns.commit(make_turn("parent", 2, *calls), 1, None)
    third = replace(
        make_turn("parent", 3, calls[0]),
        inline_results={"a": "r", "b": "q"},
        matched="1-1",
        active="1-1",
    )
    await catalog.turns.commit(third, 1, None)
    due = due_repairs(await catalog.sessions.get("parent"))
    await catalog.repairs.commit("parent", RepairCommit(due[0], b"repaired", repair, memory), 1)
    waiting = (await catalog.sessions.get("parent")).calls[0]
    output = ToolOutput(1, 1, 1, 1, 1, 1)
    result = replace(waiting, status=CallStatus.COMPLETED, result="now", batch=1, output=output)
    await catalog.tool_calls.commit("parent", result, 1, None, (0, "n"))
    return await catalog.sessions.get("parent")


def build_child(parent: Session, **changes: Any) -> Session:
    return replace(
        parent, id="child", epoch=1, worker="w", created_at=9.0, updated_at=9.0, **changes
    )


async def test_a_fork_at_the_last_turn_copies_all_state_of_its_parent(
    catalog: Catalog, parent: Session
) -> None:
    child = build_child(parent)
    await catalog.sessions.fork(ForkCommit(child, "parent", 3, b"child's"), None)
    assert await catalog.sessions.get("child") == child
    assert await catalog.sessions.get_worker_state("child") == b"child's"
    turns = [
        replace(turn, session="child") for turn in await catalog.turns.get_after("parent", 0, 9)
    ]
    assert await catalog.turns.get_after("child", 0, 9) == turns
    assert await catalog.turns.get_token_ids("child") == await catalog.turns.get_token_ids("parent")
    assert await catalog.tool_calls.get("child", "a") == await catalog.tool_calls.get("parent", "a")
    assert await catalog.tool_calls.get("child", "b") == await catalog.tool_calls.get("parent", "b")
    assert await catalog.tool_calls.get_pieces("child", child.calls[0], 0, 9) == ("n",)
    assert await catalog.repairs.get_latest("child", 9) == await catalog.repairs.get_latest(
        "parent", 9
    )
    assert await catalog.episodes.get("child") == replace(
        BUILT, episodes=(replace(EPISODE, matched=1),)
    )
    assert await catalog.episodes.get_segments("child") == list(SEGMENTS)
    assert await catalog.episodes.get_built("child", "1-1") == b"built"


async def test_a_fork_at_an_earlier_turn_resets_the_calls_of_that_turn(
    catalog: Catalog, parent: Session, calls: tuple[ToolCall, ToolCall]
) -> None:
    made = tuple(PendingCall(2, position, call) for position, call in enumerate(calls))
    child = build_child(parent, turns=2, calls=made, repairs=(), output_due=0)
    await catalog.sessions.fork(ForkCommit(child, "parent", 2, b""), None)
    found = await catalog.sessions.get("child")
    assert (
        replace(found, calls=tuple(replace(call, last_event_at=0.0) for call in found.calls))
        == child
    )
    assert [turn.number for turn in await catalog.turns.get_after("child", 0, 9)] == [1, 2]
    assert await catalog.repairs.get_latest("child", 9) == []
    assert (await catalog.episodes.get("child"), await catalog.episodes.get_segments("child")) == (
        EpisodeSet(),
        [],
    )
    with pytest.raises(UnknownEpisode):
        await catalog.episodes.get_built("child", "1-1")
    assert await catalog.tool_calls.get("child", "a") == found.calls[0]
    assert "child" in await catalog.tool_calls.get_idle_sessions(found.calls[0].last_event_at)


async def test_a_fork_at_a_turn_without_calls_has_no_pending_calls(
    catalog: Catalog, parent: Session
) -> None:
    child = build_child(parent, turns=1, calls=(), repairs=(), output_due=2)
    await catalog.sessions.fork(ForkCommit(child, "parent", 1, b""), None)
    assert await catalog.sessions.get("child") == child
    with pytest.raises(UnknownCall):
        await catalog.tool_calls.get("child", "a")


async def test_commits_to_parent_and_child_are_independent(
    catalog: Catalog, parent: Session, make_turn: MakeTurn
) -> None:
    await catalog.sessions.fork(ForkCommit(build_child(parent), "parent", 3, b""), None)
    await catalog.turns.commit(
        replace(make_turn("child", 4), inline_results={"a": "child"}, matched="1-1"), 1, None
    )
    assert (await catalog.sessions.get("parent")).calls == parent.calls
    assert (await catalog.tool_calls.get("child", "a")).result == "child"
    assert (await catalog.tool_calls.get("parent", "a")).result == "now"
    assert [each.matched for each in (await catalog.episodes.get("child")).episodes] == [2]
    assert [each.matched for each in (await catalog.episodes.get("parent")).episodes] == [1]
    await catalog.sessions.delete("parent", None)
    assert [turn.number for turn in await catalog.turns.get_after("child", 0, 9)] == [1, 2, 3, 4]
    assert await catalog.episodes.get_built("child", "1-1") == b"built"


async def test_a_fork_at_an_earlier_turn_continues_from_that_turn(
    catalog: Catalog, parent: Session, make_turn: MakeTurn
) -> None:
    child = build_child(parent, turns=2, calls=(), repairs=(), output_due=0)
    await catalog.sessions.fork(ForkCommit(child, "parent", 2, b""), None)
    await catalog.turns.commit(
        replace(make_turn("child", 3), inline_results={"a": "x", "b": "y"}), 1, None
    )
    consumed = await catalog.tool_calls.get("child", "b")
    assert (consumed.result, consumed.consumed_in_turn, consumed.status) == (
        "y",
        3,
        CallStatus.COMPLETED,
    )
    assert (await catalog.tool_calls.get("parent", "b")).result == "q"


async def test_a_fork_that_fails_leaves_nothing(catalog: Catalog, parent: Session) -> None:
    child = build_child(parent)
    for turns in (-1, 4):
        with pytest.raises(UnknownTurn):
            await catalog.sessions.fork(ForkCommit(child, "parent", turns, b""), None)
    with pytest.raises(UnknownSession):
        await catalog.sessions.fork(ForkCommit(child, "unknown", 1, b""), None)
    assert await catalog.sessions.get_ids() == ["parent"]


async def test_a_fork_s_stored_response_is_valid_as_long_as_the_child_exists(
    catalog: Catalog, parent: Session
) -> None:
    key = IdempotencyKey("POST /sessions/parent/fork", "k", "body", session="parent")
    await catalog.sessions.fork(
        ForkCommit(build_child(parent), "parent", 3, b""), IdempotencyRecord(key, "child")
    )
    assert await catalog.idempotency.get(key) == "child"
    await catalog.sessions.delete("child", None)
    assert await catalog.idempotency.get(key) is None
