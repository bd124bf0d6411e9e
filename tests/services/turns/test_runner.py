"""One turn: one writer, all or nothing, and the worker always at what was committed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    CallsOutstanding,
    CatalogError,
    IdempotencyConflict,
    InvalidRequest,
    SessionBusy,
    UnknownSession,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.events import (
    RepairFailed,
    RepairFinished,
    TurnFinished,
    TurnStarted,
)
from kvrecall.domain.messages import Message, Sampling, ToolCall
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import IdempotencyKey
from services.streams.turn import ArgumentsDelta, TextDelta, ToolCallEmitted, TurnPlanned

HELLO = Message("user", "hello there")


async def test_a_turn_is_told_in_order_and_is_committed_when_it_ends(harness) -> None:
    session = await harness.session()
    harness.worker.script = ["one two"]
    told = [progress async for progress in harness.begin(session)]
    pieces = [TextDelta("one "), TextDelta("two ")]
    assert told[:4] == [TurnStarted(session, 1), TurnPlanned(0, 3), *pieces]
    assert isinstance(told[4], TurnFinished)
    (turn,) = await harness.catalog.turns.get_after(session, 0, 10)
    assert turn.outcome == told[4].outcome
    assert turn.messages == (HELLO,)
    assert len(turn.token_ids) == 5
    assert turn.outcome.seconds["decode"] == 0.75


async def test_phases_are_placed_from_the_turns_arrival_on(harness) -> None:
    session = await harness.session()
    outcome = await harness.say(session, HELLO)
    starts = outcome.phase_starts
    assert set(starts) == set(outcome.seconds) == {"waiting", "prefill", "decode"}
    assert starts["waiting"] == 0.0
    # The worker says both from the arrival of its request, which came behind the wait.
    assert starts["prefill"] >= outcome.seconds["waiting"]
    assert starts["decode"] - starts["prefill"] == pytest.approx(0.25, abs=1e-5)


async def test_turns_follow_each_other_without_opening_the_session_again(harness) -> None:
    session = await harness.session()
    for number in (1, 2, 3):
        assert (await harness.say(session, HELLO)).turn == number
    assert harness.worker.call_log == ["open 0"]


async def test_remembering_says_nothing_and_counts_as_a_turn(harness) -> None:
    session = await harness.session()
    outcome = await harness.say(session, HELLO, Message("assistant", "hi"), generate=False)
    assert (outcome.message, outcome.finish_reason, outcome.output_tokens) == (
        None,
        "appended",
        0,
    )


async def test_a_second_turn_meanwhile_is_refused_and_changes_nothing(harness) -> None:
    session = await harness.session()
    first = await harness.hold_turn(session)
    with pytest.raises(SessionBusy):
        await anext(harness.begin(session))
    assert (await harness.service.get(session))[1] is SessionState.PREFILLING
    harness.worker.gates["token"].set()
    assert (await harness.outcome(first)).turn == 1


async def test_a_second_turn_that_asks_to_queue_comes_after_the_first(harness) -> None:
    session = await harness.session()
    first = await harness.hold_turn(session)
    second = harness.begin(session, queue=True)
    await asyncio.sleep(0)
    harness.worker.gates["token"].set()
    assert (await harness.outcome(second)).turn == 2
    assert (await harness.outcome(first)).turn == 1


async def test_unlike_sessions_do_not_wait_for_each_other(harness) -> None:
    one = await harness.session()
    other = await harness.session()
    first = await harness.hold_turn(one)
    outcome = await harness.say(other, HELLO, generate=False)
    assert outcome.session == other
    await first.aclose()


async def test_a_cancelled_turn_changes_nothing(harness) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    before = await harness.catalog.sessions.get(session)
    selection = await harness.selection(session)
    stream = await harness.hold_turn(session)
    await stream.aclose()
    assert await harness.catalog.sessions.get(session) == before
    assert harness.worker.open_turns == 0
    assert (await harness.service.get(session))[1] is SessionState.IDLE
    harness.worker.gates.clear()
    assert (await harness.say(session, HELLO)).turn == 2
    assert harness.worker.call_log == ["open 0", f"open {before.memory.length}"]

    undisturbed = await harness.session()
    await harness.say(undisturbed, HELLO)
    assert await harness.selection(undisturbed) == selection
    await harness.say(undisturbed, HELLO)
    assert await harness.selection(undisturbed) == await harness.selection(session)


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("turn", WorkerRefused(ErrorCode.BAD_MESSAGES, "the template has no such role")),
        ("turn", WorkerLost("gone")),
        ("token", WorkerLost("gone")),
        ("done", WorkerRefused(ErrorCode.NOT_COMPARABLE, "kept nothing")),
        ("done", RuntimeError("a mistake of ours")),
    ],
)
async def test_a_turn_that_fails_changes_nothing_and_the_next_one_works(
    harness, where: str, fault: Exception
) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    before = await harness.catalog.sessions.get(session)
    harness.worker.faults[where] = fault
    with pytest.raises(type(fault)):
        await harness.say(session, HELLO)
    assert await harness.catalog.sessions.get(session) == before
    assert (await harness.say(session, HELLO)).memory.length == before.memory.length + 4


async def test_a_worker_that_stops_without_an_answer_is_lost(harness) -> None:
    session = await harness.session()
    no_events: tuple[pb.TurnEvent, ...] = ()

    async def silent(request: pb.TurnRequest):
        for event in no_events:
            yield event

    answering = harness.worker.turn
    harness.worker.turn = silent
    with pytest.raises(WorkerLost):
        await harness.say(session, HELLO)
    harness.worker.turn = answering
    assert (await harness.say(session, HELLO)).turn == 1


async def test_a_worker_that_is_lost_after_its_answer_was_committed_is_not_missed(harness) -> None:
    session = await harness.session()
    whole = harness.worker.turn

    async def lost(request: pb.TurnRequest):
        async for event in whole(request):
            yield event
        raise WorkerLost("gone")

    harness.worker.turn = lost
    assert (await harness.say(session, HELLO)).turn == 1
    assert [turn.number for turn in await harness.catalog.turns.get_after(session, 0, 10)] == [1]


async def test_a_repair_that_begins_before_the_answer_s_stream_is_closed_is_left_alone(
    harness, call: Callable
) -> None:
    heard: list = []
    harness.service.observe(heard.append)
    session = await harness.session()
    worker = harness.worker
    whole = harness.worker.turn
    worker.gates["repair"] = asyncio.Event()

    async def slow(request: pb.TurnRequest):
        try:
            async for event in whole(request):
                yield event
        finally:
            await worker.reached["repair"].wait()

    worker.turn = slow
    worker.script = [[call("c1", "Bern")]]
    await harness.say(session, HELLO)
    assert (await harness.service.get(session))[1] is SessionState.REPAIRING
    worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert (await harness.service.get(session))[1] is SessionState.PAUSED
    assert [type(event) for event in heard if isinstance(event, RepairFailed | RepairFinished)] == [
        RepairFinished
    ]


async def test_a_turn_whose_commit_fails_is_rolled_back(harness) -> None:
    session = await harness.session()
    commit = harness.catalog.turns.commit

    async def full_disk(*args: object) -> None:
        raise CatalogError("no space left")

    harness.catalog.turns.commit = full_disk
    with pytest.raises(CatalogError):
        await harness.say(session, HELLO)
    harness.catalog.turns.commit = commit
    assert (await harness.service.get(session))[1] is SessionState.IDLE
    assert (await harness.say(session, HELLO)).memory.length == 4
    assert harness.worker.call_log == ["open 0", "open 0"]


async def test_after_a_restart_the_session_goes_on_from_what_was_committed(harness) -> None:
    crashed = await harness.session()
    undisturbed = await harness.session()
    await harness.say(crashed, HELLO)
    stream = await harness.hold_turn(crashed)
    await stream.aclose()
    await harness.crash()
    assert (await harness.say(crashed, HELLO)).turn == 2
    assert harness.worker.call_log == ["open 4"]
    for _ in range(2):
        await harness.say(undisturbed, HELLO)
    assert await harness.selection(crashed) == await harness.selection(undisturbed)


async def test_the_same_key_gives_the_same_answer_without_a_second_turn(harness) -> None:
    session = await harness.session()
    key = IdempotencyKey("turn", "k", "body")
    request = TurnRequest((HELLO,), sampling=Sampling(50))
    harness.worker.script = ["one two"]
    first = [progress async for progress in harness.service.turn(session, request, key)]
    again = [progress async for progress in harness.service.turn(session, request, key)]
    assert again == [replace(first[0], replayed=True), TextDelta("one two"), first[-1]]
    assert (await harness.catalog.sessions.get(session)).turns == 1
    with pytest.raises(IdempotencyConflict):
        await anext(harness.service.turn(session, request, IdempotencyKey("turn", "k", "other")))


async def test_an_answer_outlives_a_restart(harness, call: Callable) -> None:
    session = await harness.session()
    key = IdempotencyKey("turn", "k", "body")
    request = TurnRequest((HELLO,), sampling=Sampling(50))
    harness.worker.script = [[call("c", "Bern")]]
    first = [progress async for progress in harness.service.turn(session, request, key)]
    await harness.crash()
    again = [progress async for progress in harness.service.turn(session, request, key)]
    whole = [progress for progress in first[2:] if not isinstance(progress, ArgumentsDelta)]
    assert again == [replace(first[0], replayed=True), *whole]
    assert isinstance(again[1], ToolCallEmitted)


async def test_a_turn_is_refused_before_anything_runs(harness) -> None:
    session = await harness.session()
    with pytest.raises(UnknownSession):
        await harness.say("nobody", HELLO)
    with pytest.raises(InvalidRequest) as caught:
        await harness.say(session, HELLO, compare_with="nobody")
    assert caught.value.details["field"] == "logprobs.compare_with"
    asks = Message("assistant", tool_calls=(ToolCall("c", "look", "{}"),))
    with pytest.raises(CallsOutstanding):
        await harness.say(session, asks)
    assert harness.worker.call_log == ["open 0"]


async def test_the_seed_of_a_turn_follows_from_the_session_and_can_be_given(harness) -> None:
    seen = []
    answering = harness.worker.turn

    def record_seed(request: pb.TurnRequest) -> AsyncIterator[pb.TurnEvent]:
        seen.append(request.sampling.seed)
        return answering(request)

    harness.worker.turn = record_seed
    session = await harness.session(seed=10)
    await harness.say(session, HELLO)
    await harness.say(session, HELLO)
    await harness.say(session, HELLO, seed=99)
    assert seen == [11, 12, 99]


async def test_every_turn_repairs_first_when_the_session_asks_for_it(harness) -> None:
    session = await harness.session(repair_on=frozenset({RepairTrigger.TURN}))
    outcome = await harness.say(session, HELLO)
    assert outcome.own_repair is not None
    assert outcome.repairs == (outcome.own_repair,)


async def test_a_turn_that_only_appends_leaves_its_repair_to_the_next(harness) -> None:
    session = await harness.session(repair_on=frozenset({RepairTrigger.TURN}))
    asked = list[tuple[bool, bool]]()
    turn = harness.worker.turn

    def watched(request: pb.TurnRequest) -> AsyncIterator[pb.TurnEvent]:
        asked.append((request.repair, request.defer_repair))
        return turn(request)

    harness.worker.turn = watched
    assert (await harness.say(session, HELLO, generate=False)).own_repair is None
    assert (await harness.say(session, HELLO)).own_repair is not None
    assert asked == [(False, True), (True, False)]


@pytest.mark.parametrize("cold", [False, True])
async def test_a_turn_reads_its_session_from_the_catalog_at_most_twice(
    harness, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    if cold:
        await harness.crash()
    reads: list[str] = []
    read = harness.catalog.sessions.get

    async def counted(id: str, tenant: str | None = None) -> Session:
        reads.append(id)
        return await read(id, tenant)

    monkeypatch.setattr(harness.catalog.sessions, "get", counted)
    stream = harness.service.turn(session, TurnRequest((HELLO,)), tenant="")
    assert isinstance([progress async for progress in stream][-1], TurnFinished)
    assert reads == [session, session]


async def test_another_tenants_turn_is_refused_as_for_an_unknown_session(harness) -> None:
    session = await harness.session(tenant="ann")
    with pytest.raises(UnknownSession):
        async for _ in harness.service.turn(session, TurnRequest((HELLO,)), tenant="ben"):
            pass
    assert harness.worker.call_log == ["open 0"]
