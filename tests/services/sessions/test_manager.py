"""A worker that was restarted behind the service's back.

Whatever is asked next finds the session as committed.
"""

from collections.abc import Callable

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerRefused
from kvrecall.domain.events import RepairFailed
from kvrecall.domain.messages import Message
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall.protocol.v1 import worker_pb2 as pb

HELLO = Message("user", "hello there")
LONG = Message("user", "kettle leaves brew steep cup")
EPISODES = EpisodeSettings(count=2, segment_utterances=2, medoid_utterances=2)


def restart(harness) -> None:
    """Lose everything that the worker holds, as its end and a new one do."""
    harness.worker.sessions.clear()
    harness.worker.call_log.clear()


async def test_a_turn_opens_the_session_again(harness) -> None:
    session = await harness.session()
    twin = await harness.session()
    for each in (session, twin):
        await harness.say(each, HELLO)
    length = (await harness.catalog.sessions.get(session)).memory.length
    restart(harness)
    outcome = await harness.say(session, HELLO)
    assert harness.worker.call_log == [f"open {length}"]
    assert outcome.turn == 2
    await harness.say(twin, HELLO)
    assert await harness.selection(session) == await harness.selection(twin)


async def test_what_a_reopened_turn_leaves_is_rolled_back_if_it_fails(harness) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    before = await harness.catalog.sessions.get(session)
    restart(harness)
    harness.worker.faults["token"] = WorkerRefused(ErrorCode.STORAGE_FAILED, "the disk is full")
    with pytest.raises(WorkerRefused):
        await harness.say(session, HELLO)
    assert (await harness.say(session, HELLO)).memory.length == before.memory.length + 4
    assert harness.worker.call_log == [f"open {before.memory.length}"] * 2


async def test_a_worker_that_forgets_again_and_again_is_not_asked_for_ever(harness) -> None:
    session = await harness.session()
    harness.worker.open = _nothing
    harness.worker.sessions.clear()
    with pytest.raises(WorkerRefused, match="not open"):
        await harness.say(session, HELLO)


async def _nothing(request: object) -> None:
    """An opened session that is not there afterwards."""


async def test_a_repair_opens_the_session_again(harness, call: Callable) -> None:
    session = await harness.session()
    failed: list[RepairFailed] = []
    harness.service.observe(
        lambda told: failed.append(told) if isinstance(told, RepairFailed) else None
    )
    repair = harness.worker.repair

    async def restart_first(request: pb.RepairRequest) -> pb.RepairResult:
        harness.worker.repair = repair
        restart(harness)
        return await repair(request)

    harness.worker.repair = restart_first
    harness.worker.script = [[call("c1", "Bern")]]
    outcome = await harness.say(session, HELLO)
    await harness.wait_until_idle(session)
    assert harness.worker.call_log == [
        f"open {outcome.memory.length}",
        'tool_call: weather {"city": "Bern"}',
    ]
    assert failed == []
    assert (await harness.catalog.sessions.get(session)).memory.promoted_rows == 2


async def test_a_build_of_episodes_opens_the_session_again(harness) -> None:
    session = await harness.session(method="epicache", budget=16, repair_rows=0, episodes=EPISODES)
    for _ in range(3):
        await harness.say(session, LONG)
        await harness.wait_until_idle(session)
    await harness.say(session, LONG)
    length = (await harness.catalog.sessions.get(session)).memory.length
    restart(harness)
    await harness.wait_until_idle(session)
    assert harness.worker.call_log == [f"open {length}"]
    assert (await harness.catalog.episodes.get(session)).builds == 1


async def test_a_turn_opens_a_session_again_that_is_not_as_committed(harness) -> None:
    session, twin = await harness.session(), await harness.session()
    for each in (session, twin):
        await harness.say(each, HELLO)
    # As after a catalog was restored from a backup: the worker is one turn ahead.
    harness.worker.sessions[session].length += 4
    harness.worker.call_log.clear()
    length = (await harness.catalog.sessions.get(session)).memory.length
    outcome = await harness.say(session, HELLO)
    assert harness.worker.call_log == [f"open {length}"]
    await harness.say(twin, HELLO)
    assert outcome.memory.length == (await harness.catalog.sessions.get(twin)).memory.length
    assert await harness.selection(session) == await harness.selection(twin)
