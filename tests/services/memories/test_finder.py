"""What a turn remembers: the nearest passages of other sessions of its memory, and of no others."""

from typing import Any

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import BadSettings, WorkerLost, WorkerRefused
from kvrecall.domain.events import EpisodesFailed
from kvrecall.domain.messages import Message
from kvrecall.domain.passages import PASSAGES_PER_TURN
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.lifecycle.forks import ForkRequest

TEA = "kettle leaves brew steep cup"
TRAINS = "station rails ticket platform carriage"
MUSIC = "piano violin quartet sonata cello"


async def open_session(harness, remember: str = "ann", **settings: Any) -> str:
    """A session with recall and a memory."""
    opened: str = await harness.session(
        method="icecache", repair_rows=0, remember=remember, **settings
    )
    return opened


async def say(harness, session: str, text: str) -> TurnOutcome:
    """Run a turn that is answered with its own words, and wait for what follows it."""
    harness.worker.script = [text]
    outcome: TurnOutcome = await harness.say(session, Message("user", text))
    await harness.wait_until_idle(session)
    return outcome


@pytest.fixture
async def told(harness) -> str:
    """A session that spoke of tea, trains and music, in a turn each."""
    session = await open_session(harness)
    for text in (TEA, TRAINS, MUSIC):
        await say(harness, session, text)
    return session


async def test_a_turn_gets_the_passages_of_its_memory_the_nearest_last(harness, told: str) -> None:
    outcome = await say(harness, await open_session(harness), "ticket platform please")
    passages = harness.worker.remembered[-1]
    log = await harness.catalog.turns.get_after(told, 0, 9)
    start = len(log[0].token_ids)
    nearest = passages[-1]
    assert (nearest.start, nearest.stop) == (start, start + len(log[1].token_ids))
    pages = await harness.catalog.sessions.get_page_ids(told)
    assert nearest.page_ids in pages
    assert len(passages) == 3
    assert outcome.remembered is not None
    assert outcome.remembered.sessions == (told,)
    assert outcome.remembered.tokens == sum(each.stop - each.start for each in passages)
    assert outcome.seconds["find"] > 0


async def test_sessions_of_other_names_tenants_and_salts_get_nothing(harness, told: str) -> None:
    for other in ({"remember": "ben"}, {"tenant": "u"}, {"cache_salt": "salt"}, {"remember": ""}):
        outcome = await say(harness, await open_session(harness, **other), TRAINS)
        assert harness.worker.remembered[-1] == []
        assert outcome.remembered is None


async def test_a_deleted_session_is_not_remembered_from_then_on(harness, told: str) -> None:
    session = await open_session(harness)
    await say(harness, session, TRAINS)
    assert harness.worker.remembered[-1]
    await harness.service.delete(told)
    await say(harness, session, TRAINS)
    assert harness.worker.remembered[-1] == []


async def test_a_session_remembers_itself_once_it_has_more_than_a_turn_sees(
    harness, told: str
) -> None:
    await say(harness, told, TRAINS)
    assert harness.worker.remembered[-1] == []
    for number in range(PASSAGES_PER_TURN - 3):
        await say(harness, told, f"something else {number}")
    outcome = await say(harness, told, TRAINS)
    assert outcome.remembered is not None
    assert outcome.remembered.sessions == (told,)
    log = await harness.catalog.turns.get_after(told, 0, 2)
    first, second = (len(turn.token_ids) for turn in log)
    spans = [(each.start, each.stop) for each in harness.worker.remembered[-1]]
    assert (first, first + second) in spans[-2:]


async def test_what_a_fork_has_of_its_parent_is_its_own(harness, told: str) -> None:
    child = (await harness.service.fork(told, ForkRequest())).id
    await say(harness, child, TRAINS)
    assert harness.worker.remembered[-1] == []
    for number in range(PASSAGES_PER_TURN - 3):
        await say(harness, child, f"something else {number}")
    outcome = await say(harness, child, MUSIC)
    assert outcome.remembered is not None
    assert outcome.remembered.sessions == (child,)
    assert len(harness.worker.remembered[-1]) == PASSAGES_PER_TURN


async def test_a_turn_of_a_tools_result_remembers_what_its_question_did(harness, told: str) -> None:
    session = await open_session(harness)
    harness.worker.script = [[pb.ToolCall(id="c1", name="look", arguments="{}")], "done"]
    await harness.say(session, Message("user", TRAINS))
    await harness.wait_until_idle(session)
    asked = harness.worker.remembered[-1]
    await harness.say(session, Message("tool", MUSIC, tool_call_id="c1"))
    assert harness.worker.remembered[-1][-1] == asked[-1]


@pytest.mark.parametrize(
    "error", [WorkerLost("gone"), WorkerRefused(ErrorCode.EMBEDDER_REFUSED, "no encoder")]
)
async def test_no_turn_fails_because_nothing_could_be_found(
    harness, told: str, error: Exception
) -> None:
    events: list[Any] = []
    harness.service.observe(events.append)
    session = await open_session(harness)
    harness.worker.faults["embed"] = error
    outcome = await say(harness, session, TRAINS)
    assert outcome.remembered is None
    failed = [each for each in events if isinstance(each, EpisodesFailed)]
    assert [(each.step, each.message) for each in failed] == [("remember", str(error))]


async def test_only_a_session_that_recalls_has_a_memory(harness) -> None:
    with pytest.raises(BadSettings, match="has no memory"):
        await harness.service.create(CreateSession(method="full", remember="ann"))
