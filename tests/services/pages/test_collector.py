"""What a deletion leaves is dropped by the workers, whatever happens in between."""

import asyncio

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import UnknownSession, WorkerLost, WorkerRefused
from kvrecall.domain.messages import Message
from services.pages import collector

HELLO = Message("user", "one two three four five")


@pytest.mark.parametrize(
    "error", [WorkerLost("gone"), WorkerRefused(ErrorCode.STORAGE_FAILED, "the disk is full")]
)
async def test_a_deletion_stands_though_the_worker_cannot_be_told_and_it_is_told_later(
    harness, error
) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    harness.worker.faults["delete"] = error
    await harness.service.delete(session)
    with pytest.raises(UnknownSession):
        await harness.service.get(session)
    assert harness.worker.dropped == []
    await harness.sweep()
    assert harness.worker.dropped == [(session, 0)]
    await harness.sweep()
    assert harness.worker.dropped == [(session, 0)], "once is enough"


async def test_one_that_cannot_be_dropped_stands_in_no_other_s_way(harness) -> None:
    sessions = [await harness.session() for _ in range(2)]
    for session in sessions:
        await harness.say(session, HELLO)
        await harness.catalog.sessions.delete(session, None)
    harness.worker.faults["delete"] = WorkerRefused(ErrorCode.STORAGE_FAILED, "one bad page")
    collector = harness.build_collector()
    await collector.sweep()
    assert len(harness.worker.dropped) == 1
    await collector.sweep()
    assert sorted(harness.worker.dropped) == sorted((session, 0) for session in sessions)


async def test_a_process_that_starts_drops_what_one_that_was_killed_did_not(harness) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    await harness.catalog.sessions.delete(session, None)  # as far as it came
    await harness.crash()
    for _ in range(1000):
        if harness.worker.dropped:
            break
        await asyncio.sleep(0.01)
    assert harness.worker.dropped == [(session, 0)]


async def test_a_deletion_pays_for_its_own_session_only(harness) -> None:
    class Away:
        """A worker that is away: it loses every deletion."""

        calls = 0

        async def delete(self, request: object) -> None:
            self.calls += 1
            raise WorkerLost("away")

    sessions = [await harness.session() for _ in range(20)]
    away = Away()
    harness.worker.delete = away.delete
    for number, session in enumerate(sessions, 1):
        await harness.service.delete(session)
        # Its own, and one of the sweep that it wakes, which stops at the first one that is lost. A sweep
        # may run as late as beside the next deletion.
        assert away.calls <= 2 * number
    assert len(await harness.catalog.page_refs.get_orphaned()) == 20
    del harness.worker.delete
    await harness.sweep()
    assert sorted(session for session, _ in harness.worker.dropped) == sorted(sessions)


async def test_a_deletion_waits_for_a_silent_worker_for_a_bounded_time(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(request: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(collector, "_REQUEST_SECONDS", 0.1)
    session = await harness.session()
    harness.worker.delete = silent
    await asyncio.wait_for(harness.service.delete(session), 30)
    del harness.worker.delete
    await harness.sweep()
    assert harness.worker.dropped == [(session, 0)]
