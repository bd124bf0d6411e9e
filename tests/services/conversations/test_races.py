"""Requests that meet: each gets an answer, whatever another one deletes or repeats meanwhile."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import SessionBusy, UnknownSession
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.settings.session import ForkOrigin
from kvrecall.domain.turn_request import TurnRequest
from services.catalog.records import IdempotencyKey
from services.conversations.choices import ChoiceProgress
from services.conversations.continuation import Continuation, Conversation
from services.lifecycle.forks import ForkRequest

SETTINGS = CreateSession(budget=64, repair_rows=8, seed=1)
TURN = TurnRequest((), sampling=Sampling(50))
KEY = IdempotencyKey("POST /v1/chat/completions", "one", "body")
ASKED = (Message("user", "hello there"),)
GOING_ON = (*ASKED, Message("assistant", "hi"), Message("user", "and now"))
AT_ONCE = 4


def conversation(*messages: Message, key: IdempotencyKey | None = None) -> Conversation:
    return Conversation(messages, SETTINGS, TURN, key)


async def read(found: Any) -> dict[int, str]:
    """Read one answer or several to their ends."""
    answers = {}
    async for each in found.stream:
        choice, progress = (
            (each.choice, each.progress) if isinstance(each, ChoiceProgress) else (0, each)
        )
        if isinstance(progress, TurnFinished):
            assert progress.outcome.message is not None
            answers[choice] = progress.outcome.message.content
    await found.stream.aclose()
    return answers


async def ask(harness: Any, asked: Conversation) -> tuple[Continuation, str]:
    found = await harness.service.conversations.turn(asked)
    return found, (await read(found))[0]


@pytest.fixture
def delete_what_is_found(harness: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """delete_what_is_found(times): the next sessions that are looked up are deleted right behind it."""
    conversations = harness.service.conversations
    look_up = conversations.look_up

    def begin(times: int) -> None:
        left = times

        async def look_up_and_delete(*arguments: Any) -> Any:
            nonlocal left
            found = await look_up(*arguments)
            if left and found.place is not None:
                left -= 1
                await harness.service.delete(found.place.session.id)
            return found

        monkeypatch.setattr(conversations, "look_up", look_up_and_delete)

    return begin


@pytest.mark.parametrize("key", [None, KEY])
async def test_a_session_that_is_deleted_behind_its_look_up_is_built_again(
    harness, delete_what_is_found, key
) -> None:
    harness.worker.script = ["hi", "fine"]
    first, _ = await ask(harness, conversation(*ASKED))
    delete_what_is_found(1)
    found, answer = await ask(harness, conversation(*GOING_ON, key=key))
    assert (found.match, answer) == ("built", "fine")
    assert await harness.catalog.sessions.get_ids() == [found.session]
    assert found.session != first.session


async def test_where_another_session_holds_a_shorter_part_a_fork_of_it_goes_on(
    harness, delete_what_is_found
) -> None:
    harness.worker.script = ["hi", "fine", "branch", "leaf"]
    first, _ = await ask(harness, conversation(*ASKED))
    await ask(harness, conversation(*GOING_ON))
    branch = (*GOING_ON[:2], Message("user", "something else"))
    await ask(harness, conversation(*branch))
    delete_what_is_found(1)
    leaf = (*branch, Message("assistant", "branch"), Message("user", "more"))
    found, answer = await ask(harness, conversation(*leaf))
    assert answer == "leaf"
    child, _ = await harness.service.get(found.session)
    assert (found.match, child.settings.forked_from) == ("forked", ForkOrigin(first.session, 1))


async def test_a_place_before_the_end_that_is_deleted_behind_its_look_up_is_built_again(
    harness, delete_what_is_found
) -> None:
    harness.worker.script = ["hi", "fine", "branch"]
    await ask(harness, conversation(*ASKED))
    await ask(harness, conversation(*GOING_ON))
    delete_what_is_found(1)
    branch = (*GOING_ON[:2], Message("user", "something else"))
    found, answer = await ask(harness, conversation(*branch))
    assert (found.match, answer) == ("built", "branch")


async def test_several_answers_to_a_conversation_that_is_deleted_meanwhile(
    harness, delete_what_is_found
) -> None:
    harness.worker.script = ["hi", "one", "two"]
    await ask(harness, conversation(*ASKED))
    delete_what_is_found(1)
    found = await harness.service.conversations.choices(conversation(*GOING_ON), 2)
    assert set((await read(found)).values()) == {"one", "two"}


async def test_branches_that_are_asked_for_while_their_session_is_deleted_all_get_an_answer(
    harness,
) -> None:
    harness.worker.script = ["hi"]
    first, _ = await ask(harness, conversation(*ASKED))
    deleted = asyncio.Event()
    branches = [
        conversation(*GOING_ON[:2], Message("user", f"branch {number}")) for number in range(6)
    ]

    async def delete() -> None:
        while not deleted.is_set():
            with suppress(SessionBusy):
                await harness.service.delete(first.session)
                deleted.set()

    answers, _ = await asyncio.gather(
        asyncio.gather(*(ask(harness, branch) for branch in branches)), delete()
    )
    assert [answer for _, answer in answers] == ["ok"] * len(branches)


async def test_a_fork_beside_a_turn_whose_session_is_deleted_is_of_an_unknown_session(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await harness.session()
    await harness.say(parent, *ASKED)
    held = await harness.hold_turn(parent)
    get_after = harness.catalog.turns.get_after

    async def end_and_delete(session: str, number: int, limit: int) -> Any:
        monkeypatch.setattr(harness.catalog.turns, "get_after", get_after)
        harness.worker.gates["token"].set()
        await harness.outcome(held)
        await harness.service.delete(parent)
        return await get_after(session, number, limit)

    monkeypatch.setattr(harness.catalog.turns, "get_after", end_and_delete)
    with pytest.raises(UnknownSession):
        await harness.service.fork(parent, ForkRequest(turn=1))


async def test_a_request_whose_history_is_appended_is_repeated_while_it_runs(harness) -> None:
    harness.worker.script = ["fine"]
    asked = conversation(*GOING_ON, key=KEY)
    found = await asyncio.gather(*(ask(harness, asked) for _ in range(AT_ONCE)))
    assert {answer for _, answer in found} == {"fine"}
    assert await harness.catalog.sessions.get_ids() == [found[0][0].session]


@pytest.mark.parametrize("messages", [ASKED, GOING_ON])
async def test_a_request_for_several_answers_is_repeated_while_it_runs(harness, messages) -> None:
    harness.worker.script = ["one", "two", "three"]
    asked = conversation(*messages, key=KEY)

    async def choose() -> tuple[dict[int, str], list[str]]:
        found = await harness.service.conversations.choices(asked, 3)
        return await read(found), [turn.session for turn in found.turns]

    first, *others = await asyncio.gather(*(choose() for _ in range(AT_ONCE)))
    assert set(first[0].values()) == {"one", "two", "three"}
    assert others == [first] * (AT_ONCE - 1)


async def test_forks_beside_a_turn_under_one_key_are_one_fork(harness) -> None:
    parent = await harness.session()
    await harness.say(parent, *ASKED)
    held = await harness.hold_turn(parent)
    key = replace(KEY, session=parent)
    forks = await asyncio.gather(
        *(harness.service.fork(parent, ForkRequest(turn=1), key) for _ in range(AT_ONCE))
    )
    assert len({fork.id for fork in forks}) == 1
    assert len(await harness.catalog.sessions.get_ids()) == 2
    harness.worker.gates["token"].set()
    await harness.outcome(held)
