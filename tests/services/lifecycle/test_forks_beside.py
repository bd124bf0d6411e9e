"""Forks beside a turn of the parent that runs: at a turn that is named, as that one was committed."""

import asyncio

import pytest

from kvrecall.domain.errors import SessionBusy
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.settings.session import ForkOrigin
from kvrecall.domain.turn_request import TurnRequest
from services.lifecycle.forks import ForkRequest
from tests.services.lifecycle.forking import HELLO, KEY, spoken


async def test_a_fork_at_an_earlier_turn_does_not_wait_for_the_one_that_runs(harness) -> None:
    session = await spoken(harness)
    harness.worker.gates["token"] = asyncio.Event()
    harness.worker.reached["token"].clear()
    stream = harness.service.turn(session, TurnRequest((HELLO,), sampling=Sampling(50)))
    await harness.worker.reached["token"].wait()
    child = await harness.service.fork(session, ForkRequest(1), KEY)
    assert child.turns == 1
    assert await harness.service.fork(session, ForkRequest(1), KEY) == child
    harness.worker.gates["token"].set()
    assert [progress async for progress in stream][-1].outcome.turn == 3
    await harness.say(child.id, HELLO)
    assert (await harness.service.get(child.id))[0].turns == 2


@pytest.mark.parametrize("queue", [False, True])
async def test_a_fork_at_the_last_turn_by_its_number_does_not_wait_for_the_one_that_runs(
    harness, queue: bool
) -> None:
    session = await spoken(harness)
    then = await harness.selection(session)
    harness.worker.gates["token"] = asyncio.Event()
    harness.worker.reached["token"].clear()
    stream = harness.service.turn(session, TurnRequest((HELLO,), sampling=Sampling(50)))
    await harness.worker.reached["token"].wait()
    child = await harness.service.fork(session, ForkRequest(2, queue=queue))
    assert harness.worker.call_log[-1] == "open 22"
    assert (child.turns, child.settings.forked_from) == (2, ForkOrigin(session, 2))
    assert await harness.selection(child.id) == then
    with pytest.raises(SessionBusy):
        await harness.service.fork(session, ForkRequest())
    harness.worker.gates["token"].set()
    assert [progress async for progress in stream][-1].outcome.turn == 3
    await harness.say(child.id, HELLO)
    assert await harness.selection(child.id) == await harness.selection(session)


async def test_a_fork_beside_a_turn_waits_for_the_calls_that_the_turn_before_ended_on(
    harness, call
) -> None:
    session = await harness.session()
    harness.worker.script = [[call("c1", "Bern")], "done"]
    await harness.say(session, HELLO)
    harness.worker.gates["token"] = asyncio.Event()
    harness.worker.reached["token"].clear()
    result = Message("tool", "one", tool_call_id="c1")
    stream = harness.service.turn(session, TurnRequest((result,), sampling=Sampling(50)))
    await harness.worker.reached["token"].wait()
    child = await harness.service.fork(session, ForkRequest(1))
    assert [(each.call.id, each.result) for each in child.calls] == [("c1", None)]
    harness.worker.gates["token"].set()
    assert [progress async for progress in stream][-1].outcome.turn == 2
    await harness.say(child.id, Message("tool", "two", tool_call_id="c1"))
