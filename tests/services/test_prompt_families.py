"""Sessions that begin with the same system messages and tools run in one worker, their family's."""

from typing import Any

import pytest

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.events import SessionOpened
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session
from services.cluster.prompt_family import prompt_family

SYSTEM = Message("system", "you help people with everything they want")
ANN = Message("user", "my name is ann")
TOOL = '{"type": "function", "function": {"name": "weather"}}'


@pytest.fixture
def worker(harness) -> Any:
    """Three workers."""
    harness.worker.names = ["one", "two", "three"]
    return harness.worker


def opened(heard: list[Any]) -> list[SessionOpened]:
    return [each for each in heard if isinstance(each, SessionOpened)]


async def get(harness, session: str) -> Session:
    found, _ = await harness.service.get(session)
    return found


async def settle_family(harness, session: str, *messages: Message, home: str) -> None:
    """Give the family of a session a worker."""
    family = prompt_family((await get(harness, session)).settings, messages)
    harness.worker.homes[family] = home


async def test_a_first_turn_runs_in_the_worker_of_its_family(harness, worker) -> None:
    session = await harness.session()
    await settle_family(harness, session, SYSTEM, home="two")
    heard = harness.hear()
    outcome = await harness.say(session, SYSTEM, ANN)
    assert (outcome.worker, (await get(harness, session)).worker) == ("two", "two")
    assert [(each.worker, each.reason) for each in opened(heard)] == [("two", "first_use")]


async def test_sessions_that_remember_each_other_are_one_family_whatever_they_begin_with(
    harness,
) -> None:
    family = {
        prompt_family((await get(harness, session)).settings, messages)
        for session, messages in (
            (await harness.session(method="icecache", repair_rows=0, remember="ann"), [SYSTEM]),
            (await harness.session(method="icecache", repair_rows=0, remember="ann"), [ANN]),
        )
    }
    assert len(family) == 1
    other = await harness.session(method="icecache", repair_rows=0, remember="ben")
    assert prompt_family((await get(harness, other)).settings, [ANN]) not in family


async def test_later_turns_stay_where_the_session_is(harness, worker) -> None:
    session = await harness.session()
    await settle_family(harness, session, SYSTEM, home="two")
    await harness.say(session, SYSTEM, ANN)
    await settle_family(harness, session, SYSTEM, home="three")
    heard = harness.hear()
    assert (await harness.say(session, SYSTEM, ANN)).worker == "two"
    await harness.crash()
    harness.worker.names, harness.worker.homes = worker.names, worker.homes
    assert (await harness.say(session, SYSTEM, ANN)).worker == "two"
    assert opened(heard) == []


async def test_a_session_with_tools_is_created_in_the_worker_of_its_family(harness, worker) -> None:
    first = await harness.session(tools=(TOOL,))
    await settle_family(harness, first, home="three")
    second = await harness.session(tools=(TOOL,))
    assert (await get(harness, second)).worker == "three"
    heard = harness.hear()
    assert (await harness.say(second, ANN)).worker == "three"
    assert opened(heard) == [], "it was open there"


async def test_without_system_messages_and_tools_a_session_stays_where_it_was_created(
    harness, worker
) -> None:
    session = await harness.session()
    worker.homes[""] = "three"
    heard = harness.hear()
    assert (await harness.say(session, ANN, SYSTEM)).worker == "one"
    assert opened(heard) == []


async def test_a_session_whose_first_messages_are_known_is_created_where_its_turn_runs(
    harness, worker
) -> None:
    first = await harness.session()
    await settle_family(harness, first, SYSTEM, home="two")
    request = CreateSession(budget=64)
    session = await harness.service.create(request, None, (SYSTEM, ANN))
    assert session.worker == "two"
    heard = harness.hear()
    assert (await harness.say(session.id, SYSTEM, ANN)).worker == "two"
    assert opened(heard) == []


async def test_a_family_whose_worker_is_lost_goes_on_in_another_one(harness, worker) -> None:
    session = await harness.session()
    await settle_family(harness, session, SYSTEM, home="two")
    heard = harness.hear()
    worker.faults["token"] = WorkerLost("gone")
    outcome = await harness.say(session, SYSTEM, ANN)
    assert (outcome.worker, outcome.retries) == ("one", 1)
    assert [each.reason for each in opened(heard)] == ["first_use", "worker_lost"]


async def test_a_turn_counts_as_load_until_it_ends(harness, worker) -> None:
    session = await harness.session()
    assert worker.turning == []
    stream = await harness.hold_turn(session)
    assert worker.turning == [session]
    worker.gates["token"].set()
    await harness.outcome(stream)
    assert worker.turning == []
    worker.faults["token"] = WorkerLost("gone")
    worker.names = ["one"]
    with pytest.raises(WorkerLost):
        await harness.say(session, ANN)
    assert worker.turning == []
