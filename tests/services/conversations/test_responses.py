"""Going on from a stored response: by its digest where that will do, from the turn log where not."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import (
    CallsOutstanding,
    LimitExceeded,
    UnknownResponse,
    WorkerLost,
)
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.responses import StoredResponse
from services.conversations.continuation import Conversation
from services.conversations.responses import RecordedStream
from services.streams.turn import TextDelta, TurnProgress

SETTINGS = CreateSession(budget=64, repair_rows=8, seed=1)
TURN = TurnRequest((), sampling=Sampling(50))
KIND = (Message("system", "be kind"),)


def user(text: str) -> Message:
    return Message("user", text)


async def ask(
    harness: Any, *messages: Message, follows: StoredResponse | None = None, **changes: Any
) -> tuple[str, StoredResponse, TurnOutcome]:
    """Answer messages after a response; returns how its session was found, and what is stored."""
    conversation = Conversation(messages, SETTINGS, TURN, follows=follows)
    conversation = replace(conversation, **changes)
    found = await harness.service.conversations.turn(conversation)
    async for progress in found.stream:
        if isinstance(progress, TurnFinished):
            outcome = progress.outcome
    response = StoredResponse(
        f"resp_{found.session}_{found.turn}",
        "",
        found.session,
        found.turn,
        found.opening.hex(),
        found.history(outcome.message).hex(),
        len(conversation.opening),
        "{}",
    )
    await harness.service.responses.store(response)
    return found.match, response, outcome


async def test_a_chain_reads_one_turn_at_a_time_and_computes_what_is_new(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, response, _ = await ask(harness, user("a"), opening=KIND)
    reads = []
    get_after = harness.catalog.turns.get_after

    async def count(session: str, number: int, limit: int) -> Any:
        reads.append(limit)
        return await get_after(session, number, limit)

    monkeypatch.setattr(harness.catalog.turns, "get_after", count)
    for text in ("b", "c", "d"):
        match, response, outcome = await ask(harness, user(text), opening=KIND, follows=response)
        assert (match, outcome.prompt_tokens) == ("continued", 2)
    assert reads == [1, 1, 1]
    assert response.turn == 4


async def test_a_chain_goes_on_after_a_restart_and_as_a_whole_history(harness) -> None:
    harness.worker.script = ["one", "two", "three"]
    _, first, _ = await ask(harness, user("a"))
    await harness.crash()
    match, second, _ = await ask(harness, user("b"), follows=first)
    assert match == "continued"
    said = [user("a"), Message("assistant", "one"), user("b"), Message("assistant", "ok")]
    match, third, _ = await ask(harness, *said, user("c"))
    assert (match, third.session) == ("continued", second.session)


async def test_other_openings_and_settings_are_told_the_conversation_without_the_former_opening(
    harness,
) -> None:
    _, first, _ = await ask(harness, user("a"), opening=KIND)
    others: list[dict[str, Any]] = [
        {"opening": ()},
        {"opening": (Message("system", "be brief"),)},
        {"opening": KIND, "settings": replace(SETTINGS, budget=65)},
    ]
    for changes in others:
        match, response, _ = await ask(harness, user("b"), follows=first, **changes)
        assert match == "built"
        turns = await harness.service.turns(response.session, 0, 9)
        said = [message.content for turn in turns for message in turn.messages]
        opening = [message.content for message in changes["opening"]]
        assert said == [*opening, "a", "ok", "b"]


class TestWithBound:
    """A service whose conversations have at most 1024 bytes."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(max_conversation_bytes=1024, max_turn_bytes=512)

    async def test_a_chain_is_read_up_to_the_bound_and_goes_on_beyond_it(
        self, harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, response, _ = await ask(harness, user("a" * 400))
        for _ in range(4):
            match, response, _ = await ask(harness, user("a" * 400), follows=response)
            assert match == "continued"
        reads: list[int] = []
        get_after = harness.catalog.turns.get_after

        async def count(session: str, number: int, limit: int) -> Any:
            reads.append(limit)
            return await get_after(session, number, limit)

        monkeypatch.setattr(harness.catalog.turns, "get_after", count)
        with pytest.raises(LimitExceeded) as refused:
            await ask(harness, user("b"), follows=response, opening=KIND)
        assert refused.value.details == {"field": "previous_response_id", "limit": 1024}
        assert reads == [2, 1], "of five turns"
        assert len(await harness.catalog.sessions.get_ids()) == 1


async def test_a_response_that_was_followed_or_is_being_followed_is_followed_in_a_fork(
    harness,
) -> None:
    _, first, _ = await ask(harness, user("a"))
    found = await asyncio.gather(*(ask(harness, user(f"b{n}"), follows=first) for n in range(3)))
    assert sorted(match for match, _, _ in found) == ["continued", "forked", "forked"]
    assert {response.turn for _, response, _ in found} == {2}
    match, later, _ = await ask(harness, user("c"), follows=found[0][1])
    assert (match, later.session) == ("continued", found[0][1].session)


class TestWhereDamageIsRefused:
    """A service that refuses damaged histories."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(damaged_history="refuse")

    async def test_calls_of_a_response_are_answered_before_anything_else(self, harness) -> None:
        calls = [pb.ToolCall(id="s1", name="f", arguments="{}")]
        harness.worker.script = [calls, "done"]
        _, first, _ = await ask(harness, user("a"))
        with pytest.raises(CallsOutstanding, match="s1"):
            await ask(harness, user("b"), follows=first)
        result = Message("tool", "1", tool_call_id="s1")
        match, _, outcome = await ask(harness, result, follows=first)
        assert outcome.message is not None
        assert (match, outcome.message.content) == ("continued", "done")


async def test_a_response_whose_session_is_gone_is_unknown(harness) -> None:
    _, first, _ = await ask(harness, user("a"))
    await harness.service.delete(first.session)
    for opening in ((), KIND):
        with pytest.raises(UnknownResponse, match=first.id):
            await ask(harness, user("b"), follows=first, opening=opening)
    assert await harness.catalog.sessions.get_ids() == []


async def test_another_tenants_response_is_unknown(harness) -> None:
    _, first, _ = await ask(harness, user("a"))
    assert await harness.service.responses.get(first.id, "") == first
    for call in (harness.service.responses.get, harness.service.responses.delete):
        with pytest.raises(UnknownResponse):
            await call(first.id, "ann")
    await harness.service.responses.delete(first.id, "")


class Scripted:
    """A stream of some progress, which may fail at its end."""

    def __init__(self, *progress: TurnProgress, error: Exception | None = None) -> None:
        self._progress = list(progress)
        self._error = error
        self.closed = False

    def __aiter__(self) -> "Scripted":
        return self

    async def __anext__(self) -> TurnProgress:
        if self._progress:
            return self._progress.pop(0)
        raise self._error or StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


ENDED = TurnFinished(TurnOutcome("s", 1, None, "stop", 1, 1, MemoryReport(), (), {}))


class TestRecordedStream:
    """What came of a turn is stored before its end is passed on."""

    async def test_the_end_waits_for_the_record_and_the_rest_does_not(self) -> None:
        log: list[object] = []

        async def record(outcome: TurnOutcome) -> None:
            await asyncio.sleep(0)
            log.append("stored")

        async def close() -> None:
            log.append("closed")

        stream = RecordedStream(Scripted(TextDelta("a"), ENDED), record, close, log.append)
        async for progress in stream:
            log.append(type(progress).__name__)
        await stream.aclose()
        assert log == [TextDelta("a"), "TextDelta", "stored", "TurnFinished", "closed"]

    async def test_a_turn_that_fails_is_not_recorded_and_the_stream_is_closed(self) -> None:
        log: list[str] = []

        async def record(outcome: TurnOutcome) -> None:
            log.append("stored")

        async def close() -> None:
            log.append("closed")

        turn = Scripted(TextDelta("a"), error=WorkerLost("gone"))
        stream = RecordedStream(turn, record, close)
        with pytest.raises(WorkerLost):
            async for _ in stream:
                pass
        await stream.aclose()
        assert (log, turn.closed) == (["closed"], True)

    async def test_a_reader_that_leaves_while_it_is_stored_loses_nothing(self) -> None:
        storing, stored = asyncio.Event(), asyncio.Event()
        log: list[str] = []

        async def record(outcome: TurnOutcome) -> None:
            storing.set()
            await stored.wait()
            log.append("stored")

        async def close() -> None:
            log.append("closed")

        stream = RecordedStream(Scripted(ENDED), record, close)
        reader = asyncio.ensure_future(anext(stream))
        await storing.wait()
        reader.cancel()
        closing = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0)
        assert log == []
        stored.set()
        await closing
        assert log == ["stored", "closed"]
