"""Work beside the event loop has threads of its own: nobody waits for the loop's executor."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from kvrecall.domain.messages import Message
from tests.services.conftest import Harness


@pytest.fixture
def busy_executor() -> Iterator[ThreadPoolExecutor]:
    """An executor whose one thread does something else for as long as the test runs."""
    gate = Event()
    executor = ThreadPoolExecutor(1)
    executor.submit(gate.wait)
    yield executor
    gate.set()
    executor.shutdown()


async def test_a_commit_waits_for_no_work_in_the_loops_executor(
    harness: Harness, busy_executor: ThreadPoolExecutor
) -> None:
    asyncio.get_running_loop().set_default_executor(busy_executor)
    session = await harness.session()
    large = Message("user", "a word " * 4000)  # its state is packed on a thread
    async with asyncio.timeout(60):
        outcome = await harness.say(session, large)
    assert outcome.message is not None
