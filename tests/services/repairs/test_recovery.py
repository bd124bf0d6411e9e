"""Repairs that crash, fail or are refused lead to the selection that was committed."""

import asyncio
from collections.abc import Callable

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    CatalogError,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.events import RepairFailed, ServiceEvent
from kvrecall.domain.messages import Message

HELLO = Message("user", "hello")
WAITING = {"wait_for_repairs": True}
EARLY = 'tool_call: weather {"city": "Bern"}'


async def conversation(harness, call: Callable, crashes: set[int], amid_repair: bool) -> bytes:
    """A pause with two calls, crashes after some of its steps, and the turn that ends it.

    The selection it ends in.
    """
    session = await harness.session()
    steps = (
        lambda: harness.pause(session, call("c1", "Bern"), call("c2", "Rome")),
        lambda: harness.complete_call(session, "c2", "sun"),
        lambda: harness.complete_call(session, "c1", "rain"),
    )
    for number, step in enumerate(steps):
        if number in crashes and amid_repair:
            await harness.wait_until_idle(session)
            harness.worker.gates["repair"] = asyncio.Event()
            harness.worker.reached["repair"].clear()
        await step()
        if number in crashes:
            if amid_repair:
                await harness.worker.reached["repair"].wait()
            await harness.crash()
    await harness.say(session, HELLO, **WAITING)
    return await harness.selection(session)


@pytest.mark.parametrize("crashes", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}])
@pytest.mark.parametrize("amid_repair", [True, False])
async def test_a_crash_in_a_pause_leads_to_the_same_selection_as_none(
    harness, call: Callable, crashes: set[int], amid_repair: bool
) -> None:
    undisturbed = await conversation(harness, call, set(), amid_repair=False)
    assert await conversation(harness, call, crashes, amid_repair) == undisturbed


async def test_a_repair_whose_commit_fails_is_run_again_from_what_was_committed(
    harness, call: Callable
) -> None:
    undisturbed = await conversation(harness, call, set(), amid_repair=False)
    commit = harness.catalog.repairs.commit

    async def fails_once(*args: object) -> None:
        harness.catalog.repairs.commit = commit
        raise CatalogError("no space left")

    harness.catalog.repairs.commit = fails_once
    assert await conversation(harness, call, set(), amid_repair=False) == undisturbed


async def test_a_repair_that_fails_stays_due_and_a_turn_that_waits_runs_it(
    harness, call: Callable
) -> None:
    heard: list[ServiceEvent] = []
    harness.service.observe(heard.append)
    session = await harness.session()
    harness.worker.faults["repair"] = WorkerLost("gone")
    await harness.pause(session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    assert RepairFailed(session, "tool_call", "worker_lost", "gone", final=False) in heard
    outcome = await harness.say(session, Message("tool", "rain", tool_call_id="c1"), **WAITING)
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call"]
    assert harness.repairs == [EARLY]
    assert harness.worker.call_log[1] == "open 2"


@pytest.mark.parametrize(
    "failure",
    [WorkerLost("out of memory"), WorkerRefused(ErrorCode.WORKER_ERROR, "an IndexError")],
)
async def test_a_repair_that_always_breaks_is_given_up_for_the_turn(
    harness, paused: str, failure: Exception
) -> None:
    await harness.wait_until_idle(paused)
    repairing = harness.worker.repair
    broken = []

    async def breaks(request: object) -> None:
        broken.append(request)
        raise failure

    harness.worker.repair = breaks
    await harness.complete_call(paused, "c1", "rain")
    await harness.wait_until_idle(paused)
    outcome = await harness.say(paused, **WAITING)
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call"]
    assert (
        len(broken) == 3
    )  # in the background, by the turn, by the turn after the session was opened again
    harness.worker.repair = repairing


async def test_no_repair_is_given_up_while_the_worker_is_gone(harness, paused: str) -> None:
    await harness.wait_until_idle(paused)
    repairing = harness.worker.repair
    opening = harness.worker.open

    async def gone(request: object) -> None:
        raise WorkerLost("gone")

    harness.worker.repair = harness.worker.open = gone
    await harness.complete_call(paused, "c1", "rain")
    with pytest.raises(WorkerLost):
        await harness.say(paused, **WAITING)
    harness.worker.repair = repairing
    harness.worker.open = opening
    outcome = await harness.say(paused, **WAITING)
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call", "tool_result"]


async def test_a_signal_that_is_refused_is_not_tried_again(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.faults["repair"] = WorkerRefused(
        ErrorCode.TURN_TOO_LONG, "the signal is longer than a block"
    )
    await harness.pause(session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    outcome = await harness.say(session, Message("tool", "rain", tool_call_id="c1"), **WAITING)
    assert (outcome.repairs, outcome.repairs_skipped) == ((), 0)
    assert harness.repairs == []
