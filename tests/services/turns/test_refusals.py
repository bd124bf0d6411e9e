"""Turns that the worker refuses: they change nothing, and the session goes on."""

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerRefused
from kvrecall.domain.messages import Message

HELLO = Message("user", "hello there")


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
