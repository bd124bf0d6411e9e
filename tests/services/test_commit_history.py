"""The gateway gives a worker the commit history; a refused turn changes nothing of it."""

from itertools import pairwise

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.commit_points import CommitPoint
from kvrecall.domain.sessions.session import SharedPages
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.lifecycle.forks import ForkRequest

HELLO = Message("user", "hello there")
LONG = Message("user", "one two three four five six seven eight nine")
SYSTEM = Message("system", "you help people with everything they want")


def history(spec: pb.SessionSpec | pb.SharedPages) -> list[tuple[int, int]]:
    return [(point.epoch, point.length) for point in spec.history]


async def give_up(harness, session: str) -> None:
    """Run a turn whose worker is lost in the middle, in every attempt."""
    harness.worker.faults["token"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await harness.say(session, HELLO)


async def test_an_opening_has_the_committed_length_of_each_epoch(harness) -> None:
    session = await harness.session()
    lengths = []
    for _ in range(3):
        lengths.append((await harness.say(session, HELLO)).memory.length)
        await give_up(harness, session)
    await harness.say(session, HELLO)
    found = history(harness.worker.specs[session])
    assert [length for _, length in found] == lengths
    assert all(before < after for (before, _), (after, _) in pairwise(found))
    assert found[-1][0] < harness.worker.specs[session].epoch


async def test_a_fork_has_the_history_of_the_pages_that_it_shares(harness) -> None:
    parent = await harness.session()
    await harness.say(parent, LONG)
    await give_up(harness, parent)
    await harness.say(parent, LONG)
    points = await harness.catalog.sessions.get_history(parent)
    child = await harness.service.fork(parent, ForkRequest())
    expected = (CommitPoint(1, points[0].length), CommitPoint(points[1].epoch, 4 * 5))
    assert child.shared == (SharedPages(parent, 5, expected),)
    (shared,) = harness.worker.specs[child.id].shared
    assert history(shared) == [(point.epoch, point.length) for point in expected]
    early = await harness.service.fork(parent, ForkRequest(1))
    assert early.shared == (SharedPages(parent, 2, (CommitPoint(1, 8),)),)


async def test_a_prefix_is_known_with_the_epoch_that_committed_it(harness) -> None:
    first = await harness.session()
    await give_up(harness, first)
    await harness.say(first, SYSTEM, LONG)
    ((epoch, _),) = [(p.epoch, p.length) for p in await harness.catalog.sessions.get_history(first)]
    assert epoch > 1
    second = await harness.session()
    await harness.say(second, SYSTEM, LONG)
    (offered,) = harness.worker.prefixes[-1].shared
    assert [point for point, _ in history(offered)] == [epoch]
    (shared,) = (await harness.service.get(second))[0].shared
    assert shared.history == (CommitPoint(epoch, 4 * shared.pages),)


@pytest.mark.parametrize("code", [ErrorCode.TURN_TOO_LONG, ErrorCode.OVERLOADED])
async def test_refused_turns_cost_no_epoch_no_commit_and_no_opening(
    harness, code: ErrorCode
) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    before = await harness.catalog.sessions.get(session)
    for _ in range(5):
        harness.worker.faults["turn"] = WorkerRefused(code, "not this one")
        with pytest.raises(WorkerRefused):
            await harness.say(session, HELLO)
    assert await harness.catalog.sessions.get(session) == before
    assert (await harness.say(session, HELLO)).turn == 2
    assert harness.worker.epochs == [1]


async def test_a_session_that_its_worker_closed_after_a_refusal_is_opened_again(harness) -> None:
    session = await harness.session()
    before = (await harness.say(session, HELLO)).memory.length
    harness.worker.faults["done"] = WorkerRefused(ErrorCode.NOT_COMPARABLE, "kept nothing")
    with pytest.raises(WorkerRefused):
        await harness.say(session, HELLO)
    assert (await harness.say(session, HELLO)).memory.length == before + 4
    assert len(harness.worker.epochs) == 2
