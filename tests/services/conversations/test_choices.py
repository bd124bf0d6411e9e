"""Several answers to one conversation: sessions of their own, of which one goes on."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.settings.session import BRANCH_SECONDS
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import IdempotencyKey
from services.conversations.choices import Choices
from services.conversations.continuation import Continuation, Conversation

SETTINGS = CreateSession(budget=64, repair_rows=8, seed=1)
TURN = TurnRequest((), sampling=Sampling(50))
CONVERSATION = Conversation((Message("user", "hello there"),), SETTINGS, TURN)
KEY = IdempotencyKey("POST /v1/chat/completions", "one", "body")


async def read(found: Choices) -> list[Message]:
    """Read all answers to their ends."""
    answers: dict[int, Message] = {}
    async for each in found.stream:
        if isinstance(each.progress, TurnFinished):
            assert each.progress.outcome.message is not None
            answers[each.choice] = each.progress.outcome.message
    await found.stream.aclose()
    return [answers[choice] for choice in sorted(answers)]


@pytest.fixture
def requests(harness: Any) -> list[pb.TurnRequest]:
    """The turns that the worker was asked for."""
    worker_turn, asked = harness.worker.turn, list[pb.TurnRequest]()

    async def turn(request: pb.TurnRequest) -> AsyncIterator[pb.TurnEvent]:
        asked.append(request)
        async for event in worker_turn(request):
            yield event

    harness.worker.turn = turn
    return asked


async def go_on(harness: Any, *messages: Message) -> Continuation:
    conversation = replace(CONVERSATION, messages=messages)
    found: Continuation = await harness.service.conversations.turn(conversation)
    async for _ in found.stream:
        pass
    return found


async def get_sessions(harness: Any) -> set[str]:
    return set(await harness.catalog.sessions.get_ids())


async def test_each_answer_has_a_session_and_the_one_that_is_echoed_goes_on(harness) -> None:
    harness.worker.script = ["one", "two", "three", "fine"]
    found = await harness.service.conversations.choices(CONVERSATION, 3)
    answers = await read(found)
    assert sorted(each.content for each in answers) == ["one", "three", "two"]
    assert (found.match, len({turn.session for turn in found.turns})) == ("built", 3)
    for choice, turn in enumerate(found.turns):
        said = (*CONVERSATION.messages, answers[choice])
        again = await go_on(harness, *said, Message("user", f"and {choice}"))
        assert (again.match, again.session) == ("continued", turn.session)


async def test_a_conversation_that_is_held_stays_and_its_branches_compute_what_is_new(
    harness,
) -> None:
    harness.worker.script = ["hi", "one", "two"]
    first = await go_on(harness, *CONVERSATION.messages)
    said = (*CONVERSATION.messages, Message("assistant", "hi"), Message("user", "go on please"))
    conversation = replace(CONVERSATION, messages=said)
    found = await harness.service.conversations.choices(conversation, 2)
    assert [each.content for each in await read(found)] == ["one", "two"]
    assert found.match == "forked"
    assert (await harness.service.get(first.session))[0].turns == 1
    for turn in found.turns:
        (last,) = await harness.service.turns(turn.session, 1, 1)
        assert [message.content for message in last.messages] == ["go on please"]


async def test_a_history_that_no_session_holds_is_appended_once(harness, requests) -> None:
    harness.worker.script = ["one", "two"]
    said = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    found = await harness.service.conversations.choices(replace(CONVERSATION, messages=said), 2)
    await read(found)
    assert found.match == "built"
    appended = [turn for turn in requests if not turn.generate]
    assert [message.content for message in appended[0].messages] == ["a", "b"]
    assert len(appended) == 1
    assert all(turn.appended_tokens for turn in found.turns)


@pytest.mark.parametrize("seed", [None, 5])
async def test_answers_have_seeds_of_their_own_and_the_first_the_requests(
    harness, requests, seed
) -> None:
    conversation = replace(CONVERSATION, turn=replace(TURN, seed=seed))
    await go_on(harness, *CONVERSATION.messages) if seed is None else None
    for _ in range(2):
        await read(await harness.service.conversations.choices(conversation, 3))
    seeds = [turn.sampling.seed for turn in requests if turn.generate][-6:]
    assert seeds[:3] == seeds[3:], "the same request, the same seeds"
    assert len(set(seeds)) == 3
    assert seeds[0] == (2 if seed is None else seed)


async def test_an_answer_that_fails_leaves_nothing_of_the_others(harness) -> None:
    first = await go_on(harness, *CONVERSATION.messages)
    said = (*CONVERSATION.messages, Message("assistant", "ok"), Message("user", "go on"))
    harness.worker.faults["turn"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await harness.service.conversations.choices(replace(CONVERSATION, messages=said), 3)
    assert await get_sessions(harness) == {first.session}
    assert (await harness.service.get(first.session))[0].turns == 1


async def test_what_is_refused_before_it_begins_leaves_nothing(harness) -> None:
    harness.worker.faults["open"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await harness.service.conversations.choices(CONVERSATION, 3)
    assert await get_sessions(harness) == set()


async def test_a_reader_that_leaves_cancels_all_and_leaves_nothing(harness) -> None:
    harness.worker.gates["token"] = gate = asyncio.Event()
    found = await harness.service.conversations.choices(CONVERSATION, 3)
    await harness.worker.reached["token"].wait()
    await found.stream.aclose()
    gate.set()
    assert await get_sessions(harness) == set()


async def test_a_repeated_request_gets_the_same_answers_from_the_same_sessions(harness) -> None:
    harness.worker.script = ["one", "two", "three", "four"]
    conversation = replace(CONVERSATION, key=KEY)
    first = await harness.service.conversations.choices(conversation, 2)
    answers = await read(first)
    again = await harness.service.conversations.choices(conversation, 2)
    assert await read(again) == answers
    assert [turn.session for turn in again.turns] == [turn.session for turn in first.turns]
    assert len(await get_sessions(harness)) == 2


async def test_a_branch_that_nothing_follows_goes_soon(harness) -> None:
    harness.worker.script = ["one", "two"]
    found = await harness.service.conversations.choices(CONVERSATION, 2)
    answers = await read(found)
    said = (*CONVERSATION.messages, answers[0], Message("user", "on"))
    await go_on(harness, *said)
    lifetimes = []
    for turn in found.turns:
        session, _ = await harness.service.get(turn.session)
        lifetimes.append(session.settings.get_lifetime(session.turns))
    assert lifetimes[1] == BRANCH_SECONDS
    assert lifetimes[0] == harness.settings.matched_seconds
