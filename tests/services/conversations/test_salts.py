"""Salts: a conversation goes on in sessions of its own salt, however it is found."""

from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import SessionMismatch
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from services.catalog.responses import StoredResponse
from services.conversations.continuation import Continuation, Conversation

SETTINGS = CreateSession(budget=64, repair_rows=8, seed=1)
SYSTEM = Message("system", "you help people with everything they want")
OTHERS = pytest.mark.parametrize(("own", "other"), [("ann", "ben"), ("ann", ""), ("", "ben")])


def user(text: str) -> Message:
    return Message("user", text)


def salted(salt: str, *messages: Message, **changes: Any) -> Conversation:
    """A conversation with a salt; empty: without one."""
    settings = replace(SETTINGS, cache_salt=salt)
    turn = TurnRequest((), sampling=Sampling(50))
    return replace(Conversation(messages, settings, turn), **changes)


async def read(found: Continuation) -> TurnOutcome:
    async for progress in found.stream:
        if isinstance(progress, TurnFinished):
            return progress.outcome
    raise AssertionError("no outcome")


async def ask(harness: Any, salt: str, *messages: Message, **changes: Any) -> tuple[str, str, Any]:
    """Send a whole history; returns how its session was found, the session, and the outcome."""
    found = await harness.service.conversations.turn(salted(salt, *messages, **changes))
    return found.match, found.session, await read(found)


async def answered(harness: Any, salt: str) -> StoredResponse:
    """A stored response to a first message."""
    found = await harness.service.conversations.turn(salted(salt, user("a")))
    outcome = await read(found)
    assert outcome.message is not None
    opening, history = found.opening.hex(), found.history(outcome.message).hex()
    return StoredResponse("resp_1", "", found.session, found.turn, opening, history, 0, "{}")


async def get_salt(harness: Any, session: str) -> str:
    found, _ = await harness.service.get(session)
    salt: str = found.settings.cache_salt
    return salt


@OTHERS
async def test_a_history_with_another_salt_begins_a_new_session(harness, own, other) -> None:
    _, session, outcome = await ask(harness, own, SYSTEM, user("a"))
    said = (SYSTEM, user("a"), outcome.message, user("b"))
    match, built, _ = await ask(harness, other, *said)
    assert (match, built != session) == ("built", True)
    assert await get_salt(harness, built) == other
    pages = [{*await harness.get_pages(each)} for each in (session, built)]
    assert not pages[0] & pages[1]
    match, again, _ = await ask(harness, own, *said)
    assert (match, again) == ("continued", session)


@OTHERS
async def test_an_edited_history_is_forked_under_its_own_salt_alone(harness, own, other) -> None:
    _, _, outcome = await ask(harness, own, user("a"))
    said = (user("a"), outcome.message)
    await ask(harness, own, *said, user("b"))
    edited = (*said, user("another b"))
    match, fork, _ = await ask(harness, own, *edited)
    assert (match, await get_salt(harness, fork)) == ("forked", own)
    match, built, _ = await ask(harness, other, *edited)
    assert (match, built != fork) == ("built", True)


async def test_several_answers_have_the_salt(harness) -> None:
    _, _, outcome = await ask(harness, "ann", user("a"))
    said = (user("a"), outcome.message, user("b"))
    for salt, match in (("ann", "forked"), ("ben", "built")):
        choices = await harness.service.conversations.choices(salted(salt, *said), 2)
        ended = [each async for each in choices.stream]
        assert sum(isinstance(each.progress, TurnFinished) for each in ended) == 2
        assert choices.match == match
        assert [await get_salt(harness, each.session) for each in choices.turns] == [salt] * 2


@OTHERS
async def test_a_response_is_followed_with_its_own_salt_alone(harness, own, other) -> None:
    response = await answered(harness, own)
    for changes in ({}, {"opening": (SYSTEM,)}):
        with pytest.raises(SessionMismatch) as refused:
            await ask(harness, other, user("b"), follows=response, **changes)
        assert refused.value.details == {"session": response.session, "field": "cache_salt"}
    assert await harness.catalog.sessions.get_ids() == [response.session]
    match, session, _ = await ask(harness, own, user("b"), follows=response)
    assert (match, session) == ("continued", response.session)


@OTHERS
async def test_a_response_is_told_to_its_own_salt_alone(harness, own, other) -> None:
    response = await answered(harness, own)
    told = await harness.service.conversations.read(response, own)
    assert [message.content for message in told] == ["a", "ok"]
    with pytest.raises(SessionMismatch):
        await harness.service.conversations.read(response, other)


@OTHERS
async def test_a_thread_goes_on_with_its_own_salt_alone(harness, own, other) -> None:
    conversations = harness.service.conversations
    first = await conversations.turn(salted(own, user("a")))
    await read(first)
    with pytest.raises(SessionMismatch, match="cache_salt") as refused:
        await conversations.follow(first.place, salted(other, user("b")))
    assert "ann" not in refused.value.message
    assert "ben" not in refused.value.message
    found = await conversations.follow(first.place, salted(own, user("b")))
    assert (found.match, found.session) == ("continued", first.session)
    await read(found)


@pytest.mark.parametrize(("own", "other"), [("ann", "ben"), ("", "ben")])
async def test_a_session_that_is_named_is_not_another_salts(harness, own, other) -> None:
    session = await harness.session(cache_salt=own)
    with pytest.raises(SessionMismatch, match="cache_salt"):
        await harness.service.conversations.turn_in(session, salted(other, user("a")), True)
    assert (await harness.service.get(session))[0].turns == 0


@pytest.mark.parametrize("salt", ["ann", ""])
async def test_a_session_keeps_its_salt_where_a_request_names_none(harness, salt: str) -> None:
    session = await harness.session(cache_salt="ann")
    conversation = salted(salt, user("a"))
    found = await harness.service.conversations.turn_in(session, conversation, True)
    assert (await read(found)).turn == 1
    assert await get_salt(harness, session) == "ann"
