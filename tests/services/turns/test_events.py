"""What observers learn of a turn."""

import pytest

from kvrecall.domain.errors import (
    WorkerLost,
)
from kvrecall.domain.events import (
    AnswerReplayed,
    ServiceEvent,
    SessionCreated,
    StateChanged,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import IdempotencyKey

HELLO = Message("user", "hello there")


async def test_observers_hear_of_every_turn_and_how_it_ended(harness) -> None:
    heard: list[ServiceEvent] = []
    harness.service.observe(heard.append)
    session = await harness.session()
    outcome = await harness.say(session, HELLO)
    stream = await harness.hold_turn(session)
    await stream.aclose()
    harness.worker.gates.clear()
    harness.worker.faults["turn"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await harness.say(session, HELLO)
    turns = [event for event in heard if isinstance(event, TurnFinished | TurnFailed)]
    finished = turns[0]
    assert isinstance(finished, TurnFinished)
    assert finished.outcome == outcome
    assert turns[1:] == [TurnFailed(session, "cancelled"), TurnFailed(session, "worker_lost")]
    others = [
        event for event in heard if isinstance(event, SessionCreated | TurnStarted | StateChanged)
    ]
    states = [SessionState.PREFILLING, SessionState.DECODING, SessionState.IDLE]
    assert others == [
        SessionCreated(session),
        TurnStarted(session, 1),
        *(StateChanged(session, state) for state in states),
        TurnStarted(session, 2),
        *(StateChanged(session, state) for state in states[::2]),
        TurnStarted(session, 2),
        *(StateChanged(session, state) for state in states[::2]),
    ]


async def test_observers_learn_what_a_turn_began_with_and_its_times(harness) -> None:
    finished: list[TurnFinished] = []
    harness.service.observe(
        lambda event: finished.append(event) if isinstance(event, TurnFinished) else None
    )
    session = await harness.session()
    harness.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")], "a b c"]
    await harness.say(session, HELLO)
    await harness.say(session, Message("tool", "result", tool_call_id="c1"))
    await harness.say(session, HELLO, generate=False)
    first, second, third = finished
    assert (first.start.remembered_tokens, first.start.pause) == (0, None)
    assert not first.start.after_pause
    assert second.start.remembered_tokens == first.outcome.memory.length
    assert second.start.after_pause
    assert second.start.pause is not None
    timing = second.timing
    assert timing.first_token is not None
    assert timing.per_output_token is not None
    assert 0 < timing.first_token <= timing.total
    assert 0 <= timing.commit <= timing.total
    assert third.start.pause is None
    assert third.timing.first_token is None


async def test_a_turn_that_is_sent_again_is_reported_as_replayed(harness) -> None:
    heard: list[ServiceEvent] = []
    session = await harness.session()
    key = IdempotencyKey("turn", "k", "body")
    request = TurnRequest((HELLO,), sampling=Sampling(50))
    first = [progress async for progress in harness.service.turn(session, request, key)]
    harness.service.observe(heard.append)
    again = [progress async for progress in harness.service.turn(session, request, key)]
    assert again[-1] == first[-1]
    assert [event for event in heard if isinstance(event, AnswerReplayed)] == [
        AnswerReplayed(session)
    ]
    assert not any(isinstance(event, TurnFinished) for event in heard)
