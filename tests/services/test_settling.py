"""In a pause the rows of an answer are settled, and committed; a turn that comes first does it itself."""

import asyncio
from typing import Any

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.lifecycle.forks import ForkRequest

HELLO = Message("user", "hello to you")
ANSWER = "one two three four five six seven"
PAGE = 4
WORDS = 7  # of the answer


async def read(harness: Any, session: str) -> tuple[Session, pb.SessionState]:
    """The session as it is committed, and its worker state."""
    state = await harness.catalog.sessions.get_worker_state(session)
    return await harness.catalog.sessions.get(session), pb.SessionState.FromString(state)


async def answered(harness: Any, **settings: Any) -> Any:
    """A session with an answer whose rows are not those of the full cache."""
    harness.worker.recalls = True
    harness.worker.script = [ANSWER]
    session = await harness.session(**settings)
    return session, await harness.say(session, HELLO)


async def test_an_answer_is_settled_in_the_pause(harness: Any) -> None:
    session, outcome = await answered(harness)
    assert outcome.memory.unsettled == WORDS
    await harness.wait_until_idle(session)
    committed, state = await read(harness, session)
    assert committed.memory.length == outcome.memory.length == 11
    assert committed.memory.rows == state.length == 11
    assert len(state.pending) == committed.memory.unsettled == 0
    assert committed.memory.durable
    following = await harness.say(session, HELLO)
    assert following.settled_tokens == 0
    assert following.memory.length == 11 + 4 + 1


async def test_a_turn_that_comes_first_waits_and_finds_it_settled(harness: Any) -> None:
    harness.worker.gates["settle"] = asyncio.Event()
    session, _ = await answered(harness)
    await harness.worker.reached["settle"].wait()
    following = asyncio.create_task(harness.say(session, HELLO))
    await asyncio.sleep(0)
    assert harness.worker.open_turns == 0
    harness.worker.gates["settle"].set()
    assert (await following).settled_tokens == 0
    assert harness.worker.call_log.count("open 0") == 1, "it was not opened again"


async def test_a_turn_settles_what_a_crash_left(harness: Any) -> None:
    harness.worker.gates["settle"] = asyncio.Event()
    session, outcome = await answered(harness)
    await harness.worker.reached["settle"].wait()
    await harness.crash()
    committed, state = await read(harness, session)
    assert committed.memory == outcome.memory
    assert state.length == outcome.memory.rows == 4
    following = await harness.say(session, HELLO)
    assert following.settled_tokens == WORDS
    assert following.memory.length == 11 + 4 + 1


async def test_a_turn_settles_what_a_failed_worker_did_not(harness: Any) -> None:
    harness.worker.faults["settle"] = WorkerLost("gone")
    session, outcome = await answered(harness)
    await harness.wait_until_idle(session)
    committed, _ = await read(harness, session)
    assert committed.memory == outcome.memory
    following = await harness.say(session, HELLO)
    assert following.settled_tokens == WORDS


async def test_settling_comes_before_repairs(harness: Any) -> None:
    session, _ = await answered(harness, repair_on=frozenset({RepairTrigger.LAST_OUTPUT}))
    await harness.wait_until_idle(session)
    log = [entry.split()[0] for entry in harness.worker.call_log]
    assert log == ["open", "settle", "last_output:"]


async def test_a_deletion_waits_no_longer_for_a_settling_that_hangs(harness: Any) -> None:
    harness.worker.gates["settle"] = asyncio.Event()
    session, _ = await answered(harness)
    await harness.worker.reached["settle"].wait()
    await harness.service.delete(session)
    assert harness.worker.deleted == [session]


async def test_pages_that_a_settling_writes_beside_a_deletion_are_deleted(harness: Any) -> None:
    harness.worker.gates["settle"] = asyncio.Event()
    session, _ = await answered(harness)
    await harness.worker.reached["settle"].wait()
    deletion = asyncio.create_task(harness.service.delete(session))
    await asyncio.sleep(0.05)
    assert not deletion.done(), "it waits for the commit"
    harness.worker.gates["settle"].set()
    await deletion
    await harness.collect()
    assert not harness.worker.pages


async def test_forks_share_the_pages_of_rows_that_are_stored(harness: Any) -> None:
    session, _ = await answered(harness)
    await harness.wait_until_idle(session)
    await harness.say(session, HELLO)
    await harness.wait_until_idle(session)
    for turn, pages in ((1, 1), (2, 4)):
        child = await harness.service.fork(session, ForkRequest(turn=turn))
        assert await harness.get_pages(child.id) == (await harness.get_pages(session))[:pages]
        assert len(await harness.get_pages(child.id)) == pages
        assert harness.worker.sessions[child.id].length == pages * PAGE
        assert child.memory.length == (11 if turn == 1 else 16)
