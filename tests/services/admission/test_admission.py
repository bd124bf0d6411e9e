"""Turns beyond the limits are refused at once, and a stop lets running turns end."""

import asyncio

import pytest

from kvrecall.domain.errors import (
    Overloaded,
    SessionBusy,
    ShuttingDown,
    WorkerLost,
)
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.request import CreateSession

HELLO = Message("user", "hello there")


class TestCrowded:
    """A service with one place, one waiting turn and one waiting writer."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(
            max_running_turns=1, max_waiting_turns=1, max_waiting_writers=1, queue_seconds=0.2
        )

    async def test_over_the_queue_a_turn_is_turned_away_at_once(self, harness) -> None:
        sessions = [await harness.session() for _ in range(3)]
        first = await harness.hold_turn(sessions[0])
        waiting = harness.begin(sessions[1])
        await asyncio.sleep(0.05)
        assert harness.service.status.admission.waiting == 1
        with pytest.raises(Overloaded) as caught:
            await anext(harness.begin(sessions[2]))
        assert caught.value.retry_after_seconds == 1.0
        harness.worker.gates["token"].set()
        assert (await harness.outcome(waiting)).turn == 1
        assert (await harness.outcome(first)).turn == 1

    async def test_no_turn_waits_for_a_place_without_end(self, harness) -> None:
        one = await harness.session()
        other = await harness.session()
        first = await harness.hold_turn(one)
        with pytest.raises(Overloaded):
            await anext(harness.begin(other))
        await first.aclose()
        harness.worker.gates.clear()
        assert (await harness.say(other, HELLO)).turn == 1

    async def test_only_so_many_wait_for_one_session(self, harness) -> None:
        session = await harness.session()
        first = await harness.hold_turn(session)
        second = harness.begin(session, queue=True)
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await anext(harness.begin(session, queue=True))
        with pytest.raises(SessionBusy):
            await anext(second)
        await first.aclose()


async def test_a_stop_lets_running_turns_end_and_takes_no_new_ones(harness) -> None:
    session = await harness.session()
    stream = await harness.hold_turn(session)
    stopping = asyncio.create_task(harness.service.stop())
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        harness.begin(session)
    with pytest.raises(ShuttingDown):
        await harness.service.create(CreateSession())
    harness.worker.gates["token"].set()
    assert (await harness.outcome(stream)).turn == 1
    await stopping
    assert harness.worker.closed
    await harness.start()


class TestImpatient:
    """A service that drains for a moment only."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(drain_seconds=0.05)

    async def test_a_stop_cancels_what_does_not_end_in_time(self, harness) -> None:
        session = await harness.session()
        stream = await harness.hold_turn(session)
        await harness.service.stop()
        with pytest.raises(WorkerLost, match="cancelled"):
            [progress async for progress in stream]
        assert harness.worker.open_turns == 0
        await harness.start()
        assert (await harness.catalog.sessions.get(session)).turns == 0


async def test_an_announced_stop_is_one_deadline_and_refuses_nothing_yet(harness) -> None:
    session = await harness.session()
    remaining = harness.service.announce_stop()
    assert 0 < remaining <= harness.settings.drain_seconds
    assert not harness.service.ready
    assert (await harness.say(session, HELLO)).turn == 1
    assert harness.service.announce_stop() < remaining, "the first announcement counts"
