"""What a deletion leaves is deleted by the workers, whatever happens in between."""

import asyncio

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import CatalogError, UnknownSession, WorkerLost, WorkerRefused
from kvrecall.domain.messages import Message
from services.lifecycle import deletion

HELLO = Message("user", "one two three four five")


async def wait_until_deleted(harness) -> None:
    """Wait until the service's own collector has deleted all pages."""
    for _ in range(1000):
        if not harness.worker.pages:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("there are pages left")


async def test_a_deletion_wakes_the_collector(harness) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    assert harness.worker.pages
    await harness.service.delete(session)
    await wait_until_deleted(harness)
    assert harness.worker.deleted == [session]


@pytest.mark.parametrize(
    "error", [WorkerLost("gone"), WorkerRefused(ErrorCode.STORAGE_FAILED, "the disk is full")]
)
async def test_pages_that_a_worker_did_not_delete_are_deleted_later(harness, error) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    await harness.catalog.sessions.delete(session, None)
    harness.worker.sessions.clear()
    collector = harness.build_collector()
    harness.worker.faults["delete_pages"] = error
    await collector.sweep()
    assert collector.dead == len(harness.worker.pages) == 1
    await collector.sweep()
    assert collector.dead == len(harness.worker.pages) == 0
    assert await harness.catalog.pages.get_dead(9) == []
    assert harness.worker.catalogs == {harness.catalog.id}


async def test_a_deletion_stands_though_the_worker_cannot_be_told(harness) -> None:
    session = await harness.session()
    harness.worker.faults["delete"] = WorkerLost("gone")
    await harness.service.delete(session)
    with pytest.raises(UnknownSession):
        await harness.service.get(session)
    assert harness.worker.deleted == []


async def test_a_process_that_starts_deletes_what_one_that_was_killed_did_not(harness) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    await harness.catalog.sessions.delete(session, None)  # as far as it came
    await harness.crash()
    await wait_until_deleted(harness)


async def test_dead_pages_are_deleted_in_parts(harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.pages.collector._PAGES_AT_ONCE", 2)
    session = await harness.session()
    await harness.say(session, Message("user", "word " * 40))
    assert len(harness.worker.pages) > 5
    await harness.catalog.sessions.delete(session, None)
    harness.worker.sessions.clear()
    await harness.collect()
    assert not harness.worker.pages


async def test_pages_that_a_session_has_again_are_left_alone(harness) -> None:
    first = await harness.session()
    await harness.say(first, HELLO, HELLO)
    await harness.catalog.sessions.delete(first, None)
    harness.worker.sessions.clear()
    second = await harness.session()
    await harness.say(second, HELLO, HELLO)
    harness.worker.sessions.clear()
    await harness.collect()
    assert set(await harness.get_pages(second)) <= harness.worker.pages.keys()


async def test_a_session_that_comes_to_pages_that_are_about_to_be_deleted_keeps_them(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await harness.session()
    await harness.say(first, HELLO, HELLO)
    second = await harness.session()
    await harness.catalog.sessions.delete(first, None)
    get_dead = harness.catalog.pages.get_dead

    async def get_late(limit: int) -> list[bytes]:
        monkeypatch.undo()
        dead: list[bytes] = await get_dead(limit)
        await harness.say(second, HELLO, HELLO)
        harness.worker.sessions.clear()  # both are released
        return dead

    monkeypatch.setattr(harness.catalog.pages, "get_dead", get_late)
    await harness.collect()
    assert {*await harness.get_pages(second)} == harness.worker.pages.keys()


async def test_a_deletion_waits_for_a_silent_worker_for_a_bounded_time(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(request: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(deletion, "_RELEASE_SECONDS", 0.1)
    session = await harness.session()
    harness.worker.delete = silent
    await asyncio.wait_for(harness.service.delete(session), 30)
    assert await harness.catalog.sessions.get_ids() == []


async def test_it_stops_in_the_middle_of_a_sweep_though_the_catalog_is_away(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeping = asyncio.Event()

    async def hang(limit: int) -> list[bytes]:
        sweeping.set()
        await asyncio.Event().wait()
        return []

    async def fail() -> int:
        raise CatalogError("the catalog does not answer")

    monkeypatch.setattr(harness.catalog.pages, "get_dead", hang)
    monkeypatch.setattr(harness.catalog.pages, "count_dead", fail)
    collector = harness.build_collector()
    collector.start()
    await sweeping.wait()
    async with asyncio.timeout(10):
        await collector.stop()


@pytest.mark.parametrize("steps", range(6))
async def test_it_stops_though_it_was_woken_just_before(
    harness, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    swept = asyncio.Event()

    async def sweep() -> None:
        swept.set()

    collector = harness.build_collector()
    monkeypatch.setattr(collector, "sweep", sweep)
    collector.start()
    await swept.wait()
    await asyncio.sleep(0)
    collector.wake()
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await collector.stop()
