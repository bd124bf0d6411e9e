"""Workers that come and go.

A turn goes on in another one, a session moves, and lost pages are computed again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    InvalidRequest,
    SessionBusy,
    WorkerLost,
    WorkerRefused,
    WorkerUnavailable,
)
from kvrecall.domain.events import PagesRebuilt, RepairFailed, SessionMoved, TurnRetried
from kvrecall.domain.messages import Message
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.streams.turn import TextDelta

HELLO = Message("user", "hello there")


@pytest.fixture
def heard(harness) -> list:
    """What the service tells, in a cluster of two workers."""
    told: list = []
    harness.service.observe(told.append)
    harness.worker.names = ["one", "two"]
    return told


def of_kind(heard: list, kind: type) -> list:
    return [each for each in heard if isinstance(each, kind)]


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("turn", WorkerLost("gone")),
        ("token", WorkerLost("gone")),
        ("done", WorkerLost("gone")),
        ("turn", WorkerRefused(ErrorCode.CANCELLED, "the worker is draining")),
        ("done", WorkerRefused(ErrorCode.STORAGE_FAILED, "the disk is full")),
    ],
)
async def test_a_turn_goes_on_in_another_worker(
    harness, heard: list, where: str, fault: Exception
) -> None:
    session = await harness.session()
    twin = await harness.session()
    for each in (session, twin):
        await harness.say(each, HELLO)
    harness.worker.script = ["one two three", "one two three", "one two three"]
    harness.worker.faults[where] = fault
    stream = harness.service.turn(session, TurnRequest((HELLO,)))
    told = [progress async for progress in stream]
    assert "".join(piece.text for piece in told if isinstance(piece, TextDelta)).split() == [
        "one",
        "two",
        "three",
    ]
    assert [retried.worker for retried in of_kind(heard, TurnRetried)] == ["one"]
    assert (await harness.catalog.sessions.get(session)).worker == "two"
    harness.worker.script = ["one two three"]
    await harness.say(twin, HELLO)
    assert await harness.selection(session) == await harness.selection(twin)


@pytest.mark.parametrize("where", ["token", "done"])
async def test_pages_found_lost_in_the_middle_of_a_turn_are_computed_again(
    harness, heard: list, where: str
) -> None:
    session = await harness.session()
    harness.worker.script = ["one two three"] * 2
    harness.worker.faults[where] = WorkerRefused(ErrorCode.ROWS_MISSING, "page 3 is not whole")
    told = [progress async for progress in harness.service.turn(session, TurnRequest((HELLO,)))]
    assert "".join(piece.text for piece in told if isinstance(piece, TextDelta)).split() == [
        "one",
        "two",
        "three",
    ]
    assert [rebuilt.worker for rebuilt in of_kind(heard, PagesRebuilt)] == ["one"]
    assert of_kind(heard, TurnRetried) == []


async def test_what_was_told_is_not_told_again(harness, heard: list) -> None:
    session = await harness.session()
    harness.worker.script = ["one two three"] * 2
    harness.worker.gates["token"] = asyncio.Event()
    stream = harness.service.turn(session, TurnRequest((HELLO,)))
    assert (await anext(stream)).turn == 1
    assert (await anext(stream)).prompt_tokens == 3
    harness.worker.gates["token"].set()
    assert await anext(stream) == TextDelta("one ")
    harness.worker.faults["done"] = WorkerLost("gone")
    told = [progress async for progress in stream]
    assert told[:2] == [TextDelta("two "), TextDelta("three ")]
    assert told[2].outcome.output_tokens == 3
    assert len(told) == 3


async def test_a_call_goes_on_in_another_worker_where_it_broke_off(
    harness, heard: list, call: Callable
) -> None:
    session = await harness.session()
    made = call("c", "Bern")
    harness.worker.script = [[made]] * 2
    run = harness.worker.turn

    async def break_off(request: pb.TurnRequest) -> AsyncIterator[pb.TurnEvent]:
        """Run the turn up to its second piece of arguments, once."""
        harness.worker.turn = run
        pieces = 0
        async for event in run(request):
            yield event
            pieces += event.HasField("arguments")
            if pieces == 2:
                raise WorkerLost("gone")

    harness.worker.turn = break_off
    stream = harness.service.turn(session, TurnRequest((HELLO,)))
    _, planned, *told, emitted, _ = [progress async for progress in stream]
    assert planned.prompt_tokens == 3
    assert [retried.worker for retried in of_kind(heard, TurnRetried)] == ["one"]
    assert len(told) > 2
    assert "".join(piece.arguments for piece in told) == made.arguments
    assert emitted.call.arguments == made.arguments


async def test_a_worker_that_answers_otherwise_fails_the_turn_and_changes_nothing(
    harness, heard: list
) -> None:
    session = await harness.session()
    harness.worker.script = ["one two", "one three"]
    harness.worker.faults["done"] = WorkerLost("gone")
    before = await harness.catalog.sessions.get(session)
    with pytest.raises(WorkerLost, match="a different answer"):
        await harness.say(session, HELLO)
    found = await harness.catalog.sessions.get(session)
    assert (found.turns, found.memory) == (before.turns, before.memory)
    assert (await harness.say(session, HELLO)).turn == 1


async def test_calls_that_were_made_are_told_once(harness, heard: list, call: Callable) -> None:
    session = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]] * 2
    harness.worker.faults["done"] = WorkerLost("gone")
    outcome = await harness.say(session, HELLO)
    assert [each.id for each in outcome.message.tool_calls] == ["c1"]
    await harness.wait_until_idle(session)


async def test_a_turn_is_not_tried_for_ever(harness, heard: list) -> None:
    harness.worker.names = ["one", "two", "three", "four", "five"]
    session = await harness.session()
    harness.worker.open = _lost
    harness.worker.sessions.clear()
    with pytest.raises(WorkerLost):
        await harness.say(session, HELLO)
    assert [retried.worker for retried in of_kind(heard, TurnRetried)] == ["one", "two"]


async def _lost(request: object) -> None:
    raise WorkerLost("gone")


async def test_what_another_worker_would_refuse_as_well_is_refused(harness, heard: list) -> None:
    session = await harness.session()
    harness.worker.faults["turn"] = WorkerRefused(
        ErrorCode.BAD_MESSAGES, "the template has no such role"
    )
    with pytest.raises(WorkerRefused):
        await harness.say(session, HELLO)
    assert not of_kind(heard, TurnRetried)


async def test_a_new_session_is_opened_in_another_worker(harness, heard: list) -> None:
    harness.worker.faults["open"] = WorkerLost("gone")
    session = await harness.session()
    assert (await harness.catalog.sessions.get(session)).worker == "two"


async def test_a_session_leaves_a_worker_that_drains_with_its_next_turn(
    harness, heard: list
) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    harness.worker.draining.add("one")
    harness.worker.sessions.clear()
    await harness.say(session, HELLO)
    assert (await harness.catalog.sessions.get(session)).worker == "two"


async def test_every_opening_has_an_epoch_of_its_own(harness, heard: list) -> None:
    session = await harness.session()
    for _ in range(3):
        harness.worker.faults["token"] = WorkerLost("gone")
        await harness.say(session, HELLO)
    assert harness.worker.epochs == sorted(set(harness.worker.epochs))
    assert len(harness.worker.epochs) == 4


async def test_a_repair_whose_worker_is_lost_stays_due(
    harness, heard: list, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    harness.worker.faults["repair"] = WorkerLost("gone")
    await harness.say(session, HELLO)
    await harness.wait_until_idle(session)
    assert [failed.final for failed in of_kind(heard, RepairFailed)] == [False]
    outcome = await harness.say(
        session, Message("tool", "sun", tool_call_id="c1"), wait_for_repairs=True
    )
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call"]


@pytest.mark.parametrize("where", ["open", "turn"])
async def test_lost_pages_are_computed_again_from_the_log(harness, heard: list, where: str) -> None:
    session = await harness.session()
    twin = await harness.session()
    for each in (session, twin):
        await harness.say(each, HELLO)
        await harness.say(each, HELLO)
    if where == "open":
        harness.worker.sessions.clear()
    harness.worker.faults[where] = WorkerRefused(ErrorCode.ROWS_MISSING, "page 3 is not whole")
    await harness.say(session, HELLO)
    (request,) = harness.worker.rebuilds
    said = await harness.catalog.turns.get_token_ids(twin)
    assert [token for turn in request.turns for token in turn.token_ids] == list(said)
    assert of_kind(heard, PagesRebuilt) == [PagesRebuilt(session, "one", 2, 0.5)]
    await harness.say(twin, HELLO)
    assert await harness.selection(session) == await harness.selection(twin)


@pytest.mark.parametrize(
    "error", [WorkerRefused(ErrorCode.ROWS_MISSING, "one more is gone"), WorkerLost("gone")]
)
async def test_a_rebuild_that_breaks_off_is_begun_again(
    harness, heard: list, error: Exception
) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    harness.worker.faults |= {
        "turn": WorkerRefused(ErrorCode.ROWS_MISSING, "page 3 is not whole"),
        "rebuild": error,
    }
    assert (await harness.say(session, HELLO)).turn == 2
    lost = isinstance(error, WorkerLost)
    assert len(of_kind(heard, PagesRebuilt)) == (
        not lost
    )  # another worker finds by itself whether pages are lost
    assert len(of_kind(heard, TurnRetried)) == lost


async def test_lost_pages_are_computed_again_for_a_repair_and_for_a_build(
    harness, heard: list, call: Callable
) -> None:
    settings = EpisodeSettings(count=2, segment_utterances=2, medoid_utterances=2)
    session = await harness.session(method="epicache", budget=16, repair_rows=0, episodes=settings)
    for _ in range(4):
        await harness.say(session, Message("user", "kettle leaves brew steep cup"))
    harness.worker.faults["build"] = WorkerRefused(ErrorCode.ROWS_MISSING, "a page is gone")
    await harness.wait_until_idle(session)
    assert (await harness.catalog.episodes.get(session)).builds == 1
    paused = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    harness.worker.faults["repair"] = WorkerRefused(ErrorCode.ROWS_MISSING, "a page is gone")
    await harness.say(paused, HELLO)
    await harness.wait_until_idle(paused)
    assert [rebuilt.session for rebuilt in of_kind(heard, PagesRebuilt)] == [session, paused]
    assert not of_kind(heard, RepairFailed)


async def test_pages_that_are_lost_again_and_again_fail_the_turn(harness, heard: list) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    no_events: tuple[pb.TurnEvent, ...] = ()

    async def lost(request: pb.TurnRequest):
        for event in no_events:
            yield event
        raise WorkerRefused(ErrorCode.ROWS_MISSING, "a page is gone")

    harness.worker.turn = lost
    with pytest.raises(WorkerRefused):
        await harness.say(session, HELLO)
    assert len(harness.worker.rebuilds) == 2


async def test_a_turn_says_whether_its_rows_survive_the_worker(harness) -> None:
    session = await harness.session()
    assert (await harness.say(session, HELLO)).durable
    harness.worker.durable = False
    assert not (await harness.say(session, HELLO)).durable
    assert [
        turn.outcome.durable for turn in await harness.catalog.turns.get_after(session, 0, 10)
    ] == [
        True,
        False,
    ]


async def test_a_session_moves_as_it_was_committed(harness, heard: list) -> None:
    session = await harness.session()
    twin = await harness.session()
    for each in (session, twin):
        await harness.say(each, HELLO)
    before = await harness.catalog.sessions.get(session)
    moved = await harness.service.move(session, "two")
    assert (moved.worker, moved.epoch) == ("two", before.epoch + 1)
    assert harness.worker.released == [(session, moved.epoch)]
    assert harness.worker.call_log[-1] == f"open {before.memory.length}"
    assert [each.worker for each in of_kind(heard, SessionMoved)] == ["two"]
    for each in (session, twin):
        await harness.say(each, HELLO)
    assert await harness.selection(session) == await harness.selection(twin)


async def test_without_a_name_it_moves_to_another_worker_and_back_to_where_it_is_it_does_not(
    harness, heard: list
) -> None:
    session = await harness.session()
    assert (await harness.service.move(session, None)).worker == "two"
    opened = list(harness.worker.call_log)
    assert (await harness.service.move(session, "two")).worker == "two"
    assert harness.worker.call_log == opened


async def test_a_session_moves_only_where_it_can(harness, heard: list) -> None:
    session = await harness.session()
    with pytest.raises(InvalidRequest, match="none of one, two"):
        await harness.service.move(session, "three")
    harness.worker.draining.add("two")
    with pytest.raises(WorkerUnavailable):
        await harness.service.move(session, "two")
    harness.worker.names = ["one"]
    with pytest.raises(InvalidRequest, match="one worker only"):
        await harness.service.move(session, None)


async def test_a_session_in_a_turn_does_not_move(harness, heard: list) -> None:
    session = await harness.session()
    harness.worker.gates["token"] = asyncio.Event()
    stream = harness.service.turn(session, TurnRequest((HELLO,)))
    await harness.worker.reached["token"].wait()
    with pytest.raises(SessionBusy):
        await harness.service.move(session, "two")
    await stream.aclose()


async def test_a_move_that_fails_leaves_the_session_usable(harness, heard: list) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    harness.worker.faults["open"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await harness.service.move(session, "two")
    assert (await harness.say(session, HELLO)).turn == 2
    assert (await harness.catalog.sessions.get(session)).worker == "one"


async def test_a_session_that_another_gateway_moved_is_opened_where_it_is_now(
    harness, heard: list
) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    # Its worker drains and ends, and another gateway goes on with the session in the other worker.
    await harness.catalog.leases.take_over(session, "two")
    harness.worker.call_log.clear()
    length = (await harness.catalog.sessions.get(session)).memory.length
    await harness.say(session, HELLO)
    assert harness.worker.call_log[0] == f"open {length}", "before the turn is sent anywhere"
    assert (await harness.catalog.sessions.get(session)).worker == "two"
    assert of_kind(heard, TurnRetried) == []
