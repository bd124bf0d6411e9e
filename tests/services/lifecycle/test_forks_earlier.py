"""Forks at earlier turns: the states of some turns are kept, and no replay is needed there."""

import pytest

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.page_ids import join_ids, make_random_id
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import SettleCommit
from services.lifecycle.forks import ForkRequest
from tests.services.lifecycle.forking import HELLO, LONG, fork, spoken


async def test_a_fork_at_an_earlier_turn_takes_the_state_that_was_kept_there(harness) -> None:
    parent = await spoken(harness, 1)
    then = await harness.selection(parent)
    await harness.say(parent, HELLO)
    child = await harness.service.fork(parent, ForkRequest(1))
    assert harness.worker.call_log[-1] == "open 11"
    assert (child.turns, child.memory.length) == (1, 11)
    assert await harness.get_pages(child.id) == (await harness.get_pages(parent))[:2]
    assert child.memory == (await harness.service.turns(parent, 0, 1))[0].outcome.memory
    assert await harness.selection(child.id) == then
    assert [turn.number for turn in await harness.service.turns(child.id, 0, 10)] == [1]
    await harness.say(child.id, HELLO)
    assert await harness.selection(child.id) == await harness.selection(parent)


async def test_a_fork_of_a_fork_at_its_parents_turn_takes_the_parents_state(harness) -> None:
    parent = await spoken(harness, 1)
    then = await harness.selection(parent)
    await harness.say(parent, LONG)
    child = await fork(harness, parent)
    await harness.say(child, LONG)
    grandchild = await fork(harness, child, 1)
    assert harness.worker.call_log[-1] == "open 11"
    assert await harness.selection(grandchild) == then
    await harness.service.delete(parent)
    await fork(harness, child, 1)
    assert harness.worker.call_log[-1] == "fork 1", "nobody has that state any more"


async def test_a_fork_at_an_earlier_turn_has_no_active_episode(harness) -> None:
    parent = await spoken(harness, 1)
    kept = pb.SessionState.FromString(await harness.catalog.sessions.get_worker_state(parent))
    kept.episode = "e1"
    kept.patched_prompt.append(3)
    kept.segments.add(start=1, stop=2)
    await harness.say(parent, HELLO)
    kept.page_ids = (await harness.get_pages(parent))[1]
    states = {1: kept.SerializeToString()}

    async def get_state(session: str, number: int) -> bytes:
        return states[number]

    harness.catalog.turns.get_state = get_state
    child = await fork(harness, parent, 1)
    state = pb.SessionState.FromString(await harness.catalog.sessions.get_worker_state(child))
    assert (state.episode, list(state.patched_prompt), list(state.segments)) == ("", [], [])
    assert state.length == kept.length


async def test_a_fork_where_the_parent_s_pages_were_rewritten_since_is_said_again(harness) -> None:
    parent = await spoken(harness, 1)
    first, *others = await harness.get_pages(parent)
    packed = await harness.catalog.sessions.get_worker_state(parent)
    written = join_ids([first, *(make_random_id() for _ in others)])
    commit = SettleCommit(packed, (await harness.service.get(parent))[0].memory, written)
    await harness.catalog.turns.commit_settled(parent, commit, 1)
    await harness.crash()
    await harness.say(parent, LONG)
    await fork(harness, parent, 1)
    assert harness.worker.call_log[-1] == "fork 1"


class TestOlderTurns:
    """The states of the last turns are kept, and of every 16th before."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(queue_seconds=5, drain_seconds=5, kept_states=2)

    async def test_the_kept_states_are_bounded(self, harness) -> None:
        session = await spoken(harness, 20)
        kept = [await harness.catalog.turns.get_state(session, turn) for turn in range(1, 21)]
        assert [turn for turn, state in enumerate(kept, 1) if state is not None] == [16, 19, 20]


class TestWithoutKeptStates:
    """Forks at earlier turns of sessions whose states were not kept, as those of older versions."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(queue_seconds=5, drain_seconds=5, kept_states=0)

    async def test_a_fork_at_an_earlier_turn_is_said_again(self, harness) -> None:
        parent = await spoken(harness, 1)
        then = await harness.selection(parent)
        await harness.say(parent, HELLO)
        child = await harness.service.fork(parent, ForkRequest(1))
        assert harness.worker.call_log[-1] == "fork 1"
        assert (child.turns, child.memory.length) == (1, 11)
        assert await harness.get_pages(child.id) == (await harness.get_pages(parent))[:2]
        assert await harness.selection(child.id) == then
        assert [turn.number for turn in await harness.service.turns(child.id, 0, 10)] == [1]

    async def test_a_fork_at_an_earlier_turn_that_the_worker_breaks_at_changes_nothing(
        self, harness
    ) -> None:
        session = await spoken(harness)
        harness.worker.faults["fork"] = WorkerLost("gone")
        with pytest.raises(WorkerLost):
            await harness.service.fork(session, ForkRequest(1))
        assert await harness.catalog.sessions.get_ids() == [session]
        assert (await harness.service.fork(session, ForkRequest(1))).turns == 1
