"""A turn that kills its workers is run in two of them, then refused for a while."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import TurnQuarantined, WorkerLost, WorkerRefused
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.admission.quarantine import Quarantine

DEADLY = Message("user", "the query of death")
HELLO = Message("user", "hello there")


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, drain_seconds=5, quarantine_seconds=3600)


@pytest.fixture
def deaths(harness) -> list[str]:
    """The turns that killed a worker, of four workers."""
    killed: list[str] = []
    run = harness.worker.turn

    async def turn(request: pb.TurnRequest) -> AsyncGenerator[pb.TurnEvent, None]:
        if any(DEADLY.content in message.content for message in request.messages):
            killed.append(request.session)
            raise WorkerLost("Socket closed")
        async for event in run(request):
            yield event

    harness.worker.turn = turn
    harness.worker.names = ["one", "two", "three", "four"]
    return killed


async def test_a_turn_that_kills_its_worker_is_run_in_two_and_then_refused(
    harness, deaths: list[str]
) -> None:
    session = await harness.session()
    with pytest.raises(WorkerLost):
        await harness.say(session, DEADLY)
    assert len(deaths) == 2
    for _ in range(3):
        with pytest.raises(TurnQuarantined, match="2 workers were lost") as refused:
            await harness.say(session, DEADLY)
        assert refused.value.retry_after_seconds > 3000
    assert len(deaths) == 2


async def test_a_turn_that_raises_in_its_worker_is_run_once_and_not_counted(harness) -> None:
    harness.worker.names = ["one", "two", "three", "four"]
    session = await harness.session()
    for _ in range(3):
        harness.worker.call_log.clear()
        harness.worker.faults["token"] = WorkerRefused(ErrorCode.WORKER_ERROR, "an IndexError")
        with pytest.raises(WorkerRefused, match="IndexError"):
            await harness.say(session, DEADLY)
        assert len([call for call in harness.worker.call_log if call.startswith("open")]) <= 1
    assert (await harness.say(session, DEADLY)).turn == 1


async def test_another_turn_of_the_session_is_run(harness, deaths: list[str]) -> None:
    session = await harness.session()
    with pytest.raises(WorkerLost):
        await harness.say(session, DEADLY)
    assert (await harness.say(session, HELLO)).turn == 1
    with pytest.raises(WorkerLost):
        await harness.say(session, DEADLY)
    assert len(deaths) == 4, "the session has changed: the turn is another one"


async def test_a_move_by_an_operator_ends_the_quarantine(harness, deaths: list[str]) -> None:
    session = await harness.session()
    with pytest.raises(WorkerLost):
        await harness.say(session, DEADLY)
    left = (await harness.catalog.sessions.get(session)).worker
    target = next(name for name in harness.worker.names if name != left)
    await harness.service.move(session, target)
    with pytest.raises(WorkerLost):
        await harness.say(session, DEADLY)
    assert len(deaths) == 4


async def test_after_the_quarantine_a_turn_may_kill_one_worker_at_a_time() -> None:
    quarantine = Quarantine(0.05)
    assert quarantine.add_death("s", lambda: "turn")
    quarantine.check("s", lambda: "turn")
    assert not quarantine.add_death("s", lambda: "turn")
    with pytest.raises(TurnQuarantined):
        quarantine.check("s", lambda: "turn")
    quarantine.check("s", lambda: "another turn")
    await asyncio.sleep(0.1)
    quarantine.check("s", lambda: "turn")
    assert not quarantine.add_death("s", lambda: "turn")


def test_the_number_of_suspected_turns_is_bounded() -> None:
    quarantine = Quarantine(60)
    for number in range(3000):
        quarantine.add_death(str(number), lambda: "turn")
    assert len(quarantine._suspects) == 1024
