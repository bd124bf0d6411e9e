"""Each end of a job is metered: what it computed is published once."""

import asyncio

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.domain.events import TokensComputed
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.turn_request import TurnRequest

WORDS = Message("user", "one two three four")


async def wait_until_metered(harness) -> None:
    """Wait until all that was computed is told."""
    await harness.service._context.worker.wait_until_taken()


def totals(heard: list) -> list[int]:
    return [event.total for event in heard if isinstance(event, TokensComputed)]


async def test_a_committed_turn_is_metered_once(harness) -> None:
    session = await harness.session()
    heard = harness.hear()
    harness.worker.script = ["five six"]
    outcome = await harness.say(session, WORDS)
    await wait_until_metered(harness)
    computed = outcome.prompt_tokens + outcome.output_tokens
    assert totals(heard) == [computed]


async def test_a_turn_that_its_client_leaves_is_metered(harness) -> None:
    session = await harness.session()
    heard = harness.hear()
    harness.worker.script = ["five six seven eight"]
    harness.worker.gates["token"] = asyncio.Event()
    stream = harness.service.turn(session, TurnRequest((WORDS,), sampling=Sampling(50)))
    await harness.worker.reached["token"].wait()
    await stream.aclose()
    await wait_until_metered(harness)
    assert sum(totals(heard)) >= 4


@pytest.mark.parametrize(
    "fault", [WorkerRefused(ErrorCode.WORKER_ERROR, "an IndexError"), WorkerLost("gone")]
)
async def test_a_turn_that_fails_is_metered(harness, fault: Exception) -> None:
    session = await harness.session()
    heard = harness.hear()
    harness.worker.script = ["five six", "five six"]
    harness.worker.faults["done"] = fault
    await asyncio.gather(harness.say(session, WORDS), return_exceptions=True)
    await wait_until_metered(harness)
    assert sum(totals(heard)) >= 6


async def test_what_cannot_be_taken_is_in_the_next_count(harness) -> None:
    session = await harness.session()
    heard = harness.hear()
    harness.worker.script = ["five six", "seven"]
    harness.worker.faults["take_usage"] = WorkerLost("away")
    first = await harness.say(session, WORDS)
    await wait_until_metered(harness)
    assert totals(heard) == []
    second = await harness.say(session, Message("user", "and"))
    await wait_until_metered(harness)
    computed = sum(each.prompt_tokens + each.output_tokens for each in (first, second))
    assert sum(totals(heard)) == computed
