"""Refused requests leave nothing, with a key or without; accepted ones are found again by their key."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import (
    IdempotencyConflict,
    Overloaded,
    QuotaExceeded,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import IdempotencyKey
from services.conversations.continuation import Conversation

ASKED = (Message("user", "hello there"),)
LONG = Message("user", "one two three four five six seven eight")
BASE = Conversation(
    ASKED, CreateSession(budget=64, repair_rows=8), TurnRequest((), sampling=Sampling(50))
)
KEY = IdempotencyKey("POST /v1/chat/completions", "one", "body")
KEYS = pytest.mark.parametrize("key", [None, KEY])
CHOICES = pytest.mark.parametrize("choices", [1, 3])


async def begin(harness: Any, conversation: Conversation, choices: int = 1) -> Any:
    conversations = harness.service.conversations
    if choices == 1:
        return await conversations.turn(conversation)
    return await conversations.choices(conversation, choices)


async def answer(harness: Any, conversation: Conversation, choices: int = 1) -> Any:
    """Ask and read all that comes; return what was found."""
    found = await begin(harness, conversation, choices)
    async for _ in found.stream:
        pass
    await found.stream.aclose()
    return found


@KEYS
@CHOICES
async def test_a_first_turn_that_the_worker_refuses_leaves_no_session(
    harness, key, choices
) -> None:
    harness.worker.context = 5
    refused = replace(BASE, messages=(LONG,), key=key)
    with pytest.raises(WorkerRefused):
        await answer(harness, refused, choices)
    assert await harness.catalog.sessions.get_ids() == []
    harness.worker.context = 500
    await answer(harness, refused, choices)
    assert len(await harness.catalog.sessions.get_ids()) == choices


@KEYS
@CHOICES
async def test_a_branch_that_the_worker_refuses_leaves_its_conversation_as_it_was(
    harness, key, choices
) -> None:
    harness.worker.script = ["hi", "fine"]
    said = (*ASKED, Message("assistant", "hi"))
    first = await answer(harness, BASE)
    await answer(harness, replace(BASE, messages=(*said, Message("user", "and"))))
    harness.worker.context = 10
    with pytest.raises(WorkerRefused):
        await answer(harness, replace(BASE, messages=(*said, LONG), key=key), choices)
    assert await harness.catalog.sessions.get_ids() == [first.session]
    assert (await harness.service.get(first.session))[0].turns == 2


@CHOICES
async def test_an_accepted_request_whose_client_leaves_is_found_again_by_its_key(
    harness, choices
) -> None:
    asked = replace(BASE, key=KEY)
    harness.worker.gates["token"] = gate = asyncio.Event()
    found = await begin(harness, asked, choices)
    await harness.worker.reached["token"].wait()
    await found.stream.aclose()
    gate.set()
    left = await harness.catalog.sessions.get_ids()
    assert len(left) == choices
    again = await answer(harness, asked, choices)
    assert again.session == found.session
    assert await harness.catalog.sessions.get_ids() == left


async def test_a_repetition_that_is_refused_leaves_the_answer_of_the_first(harness) -> None:
    asked = replace(BASE, key=KEY)
    first = await answer(harness, asked)
    with pytest.raises(IdempotencyConflict):
        await answer(harness, replace(asked, key=replace(KEY, fingerprint="another body")))
    again = await answer(harness, asked)
    assert (again.match, again.session) == ("repeated", first.session)


async def test_of_requests_repeated_at_once_one_that_leaves_takes_nothing_from_the_others(
    harness,
) -> None:
    asked = replace(BASE, key=KEY)
    harness.worker.faults["turn"] = WorkerLost("gone")
    results = await asyncio.gather(
        *(answer(harness, asked) for _ in range(4)), return_exceptions=True
    )
    answered = [each for each in results if not isinstance(each, BaseException)]
    assert len(answered) == 3
    assert await harness.catalog.sessions.get_ids() == [answered[0].session]
    assert {each.session for each in answered} == {answered[0].session}


class TestQuota:
    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(queue_seconds=5, drain_seconds=5, tenant_sessions=3)

    async def test_requests_at_the_quota_make_no_room_of_sessions_that_others_have_just_created(
        self, harness
    ) -> None:
        settings = replace(BASE.settings, tenant="ann", expires_after_seconds=3600)
        opened, worker_open = asyncio.Event(), harness.worker.open

        async def open_late(request: pb.OpenRequest) -> None:
            await opened.wait()
            await worker_open(request)

        harness.worker.open = open_late
        asked = [
            asyncio.create_task(
                answer(
                    harness,
                    replace(BASE, messages=(Message("user", f"{number}"),), settings=settings),
                )
            )
            for number in range(12)
        ]
        await asyncio.sleep(0.1)  # by now all are on the way, and there was room for each
        opened.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in results if isinstance(each, BaseException)]
        assert {type(each) for each in refused} <= {QuotaExceeded}
        assert len(results) - len(refused) >= 3
        assert await harness.catalog.sessions.count("ann") == 3


class TestOverload:
    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(
            queue_seconds=5, drain_seconds=5, max_running_turns=1, max_waiting_turns=0
        )

    @KEYS
    @CHOICES
    async def test_what_there_is_no_room_for_is_refused_and_leaves_nothing(
        self, harness, key, choices
    ) -> None:
        running = await harness.session()
        held = await harness.hold_turn(running)
        opened = len(harness.worker.call_log)
        asked = [
            replace(
                BASE,
                messages=(Message("user", f"hello {number}"),),
                key=None if key is None else replace(key, key=str(number)),
            )
            for number in range(30)
        ]
        results = await asyncio.gather(
            *(answer(harness, each, choices) for each in asked), return_exceptions=True
        )
        assert {type(each) for each in results} == {Overloaded}
        assert await harness.catalog.sessions.get_ids() == [running]
        if key is None:
            assert len(harness.worker.call_log) == opened, "nothing was created"
        harness.worker.gates["token"].set()
        await harness.outcome(held)
