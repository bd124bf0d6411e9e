"""Sessions of a tenant and salt that begin in the same words have the pages of these in common."""

from typing import Any

import pytest

from kvrecall.domain.events import TurnFinished
from kvrecall.domain.messages import Message
from services.lifecycle.forks import ForkRequest

SYSTEM = Message("system", "you help people with everything they want")
ANN = Message("user", "my name is ann")
BEN = Message("user", "my name is ben")


async def begun(harness: Any, *messages: Message, **settings: Any) -> tuple[str, int | None]:
    """A session that has had its first turn, and the tokens of the pages that this found."""
    session = await harness.session(**settings)
    heard = harness.hear()
    await harness.say(session, *messages)
    (finished,) = [event for event in heard if isinstance(event, TurnFinished)]
    return session, finished.start.shared_tokens


async def test_a_session_that_begins_as_another_did_has_its_pages(harness) -> None:
    first, found = await begun(harness, SYSTEM, ANN)
    assert found == 0
    second, found = await begun(harness, SYSTEM, BEN)
    assert found == 3 * 4
    assert await harness.get_pages(first) == await harness.get_pages(second)


@pytest.mark.parametrize("other", [{"tenant": "other"}, {"cache_salt": "other"}])
async def test_nothing_is_shared_between_tenants_and_salts(harness, other) -> None:
    first, _ = await begun(harness, SYSTEM, ANN)
    second, found = await begun(harness, SYSTEM, ANN, **other)
    assert found == 0
    assert not {*await harness.get_pages(first)} & {*await harness.get_pages(second)}
    assert (await begun(harness, SYSTEM, ANN, **other))[1] == 3 * 4


async def test_a_fork_has_the_salt_of_its_parent(harness) -> None:
    parent, _ = await begun(harness, SYSTEM, ANN, cache_salt="one")
    child = await harness.service.fork(parent, ForkRequest())
    assert child.settings.cache_salt == "one"
    await harness.crash()
    assert (await harness.service.get(child.id))[0].settings.cache_salt == "one"


async def test_a_later_turn_looks_for_no_pages(harness) -> None:
    session, _ = await begun(harness, SYSTEM, ANN)
    heard = harness.hear()
    await harness.say(session, SYSTEM, ANN)
    (finished,) = [event for event in heard if isinstance(event, TurnFinished)]
    assert finished.start.shared_tokens is None


async def test_pages_that_two_sessions_have_outlive_either(harness) -> None:
    first, _ = await begun(harness, SYSTEM, ANN)
    second, _ = await begun(harness, SYSTEM, BEN)
    await harness.service.delete(first)
    await harness.collect()
    assert {*await harness.get_pages(second)} == harness.worker.pages.keys()
    await harness.service.delete(second)
    await harness.collect()
    assert not harness.worker.pages
