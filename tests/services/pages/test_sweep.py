"""Pages that workers hold and no session has are deleted; those that may be committed yet are not."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest

from kvrecall.domain.errors import ManyUnknownPages, WorkerLost
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.page_ids import join_ids, make_random_id, split_ids
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.testing import StubWorker, open_catalog
from services.catalog.base import Catalog
from services.catalog.records import SessionDump
from services.context import ServiceContext
from services.pages import sweep
from services.pages.sweep import PageSweep

Build = Callable[[StubWorker], PageSweep]
HELLO = Message("user", "one two three four five")
SECONDS = 600.0


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(
        unknown_page_seconds=SECONDS, sweep_seconds=3600, drain_seconds=5, max_unknown_pages=64
    )


def make_pages(count: int, age: float = 2 * SECONDS) -> dict[bytes, float]:
    """Pages that were written so many seconds ago."""
    return dict.fromkeys((make_random_id() for _ in range(count)), time.monotonic() - age)


async def add_session(catalog: Catalog, *ids: bytes) -> None:
    """Add a session with these pages."""
    settings = SessionSettings(budget=64, repair_rows=8, method="snapkv")
    session = Session(ids[0].hex(), 1, settings, 1.0, 1.0, 0, MemoryReport(budget=64))
    await catalog.sessions.restore(SessionDump(session, b"", (), page_ids=join_ids(ids)))


class Recording(StubWorker):
    """Records the lists of pages."""

    def __init__(self, pages: dict[bytes, float]) -> None:
        super().__init__(pages)
        self.lists: list[int] = []

    async def list_pages(
        self, worker: str, request: pb.ListPagesRequest
    ) -> AsyncGenerator[pb.PageList, None]:
        async for part in super().list_pages(worker, request):
            self.lists.append(len(split_ids(part.page_ids)))
            yield part


@pytest.fixture
async def catalog() -> AsyncIterator[Catalog]:
    async with open_catalog() as catalog:
        yield catalog


@pytest.fixture
def build(catalog: Catalog, settings: ServiceLimits) -> Build:
    """build(worker): a sweep of an empty catalog and this worker."""
    return lambda worker: PageSweep(ServiceContext.create(catalog, worker, settings))


async def test_what_no_session_has_in_two_sweeps_is_deleted(build: Build, catalog: Catalog) -> None:
    known, unknown, young = make_pages(3), make_pages(5), make_pages(2, age=0.0)
    worker = StubWorker(known | unknown | young)
    await add_session(catalog, *known)
    swept = build(worker)
    assert await swept.sweep("one") == 0
    assert worker.pages.keys() == {*known, *unknown, *young}
    assert await swept.sweep("one") == 5
    assert worker.pages.keys() == {*known, *young}
    assert worker.catalogs == {catalog.id}


async def test_a_page_that_a_session_has_come_to_since_stays(
    build: Build, catalog: Catalog
) -> None:
    worker = StubWorker(make_pages(3))
    found, *_ = worker.pages
    swept = build(worker)
    await swept.sweep("one")
    await add_session(catalog, found)
    assert await swept.sweep("one") == 2
    assert worker.pages.keys() == {found}


async def test_dead_pages_are_the_collector_s(build: Build, catalog: Catalog) -> None:
    worker = StubWorker(make_pages(2))
    await add_session(catalog, *worker.pages)
    (session,) = await catalog.sessions.get_ids()
    await catalog.sessions.delete(session, None)
    swept = build(worker)
    assert [await swept.sweep("one") for _ in range(2)] == [0, 0]
    await catalog.pages.confirm_deleted(list(worker.pages))
    assert [await swept.sweep("one") for _ in range(2)] == [0, 2]


async def test_a_worker_keeps_the_pages_of_its_open_sessions(harness) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    (page,) = harness.worker.pages
    await harness.catalog.sessions.delete(session, None)
    await harness.catalog.pages.confirm_deleted([page])
    harness.worker.pages[page] -= 2 * SECONDS
    swept = harness.build_sweep()
    assert [await swept.sweep("one") for _ in range(3)] == [0, 0, 0]
    await harness.worker.delete(pb.DeleteRequest(session=session))
    assert await swept.sweep("one") == 1


async def test_pages_are_deleted_in_bounded_parts_as_they_are_listed(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_PAGES_DELETED", 9)
    worker = Recording(make_pages(40))
    swept = build(worker)
    await swept.sweep("one")
    assert worker.lists == [7, 7, 7, 7, 7, 5]
    assert await swept.sweep("one") == 40
    assert not worker.pages


async def test_a_sweep_that_fails_is_made_up_for(build: Build) -> None:
    worker = StubWorker(make_pages(1))
    swept = build(worker)
    await swept.sweep("one")
    worker.faults["delete_pages"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await swept.sweep("one")
    assert await swept.sweep("one") == 1


async def test_a_silent_worker_holds_up_no_other_and_one_that_joins_is_swept_soon(
    build: Build,
) -> None:
    class Silent(StubWorker):
        listed = 0

        async def list_pages(
            self, worker: str, request: pb.ListPagesRequest
        ) -> AsyncGenerator[pb.PageList, None]:
            if worker == "silent":
                await asyncio.Event().wait()
            self.listed += 1
            async for part in super().list_pages(worker, request):
                yield part

    worker = Silent(make_pages(1))
    worker.names = ["silent", "one"]
    swept = build(worker)
    swept.start()

    async def wait_for(lists: int) -> None:
        for _ in range(500):
            if worker.listed == lists:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{worker.listed} lists")

    await wait_for(1)
    swept.join("one")
    await wait_for(2)
    assert not worker.pages
    await swept.stop()


async def test_sweeps_go_on_periodically(catalog: Catalog, settings: ServiceLimits) -> None:
    worker = StubWorker(make_pages(1))
    limits = settings.model_copy(update={"sweep_seconds": 0.05})
    swept = PageSweep(ServiceContext.create(catalog, worker, limits))
    swept.start()
    for _ in range(500):
        if not worker.pages:
            break
        await asyncio.sleep(0.01)
    assert not worker.pages
    await swept.stop()


@pytest.fixture
def cautious(settings: ServiceLimits) -> ServiceLimits:
    """Limits under which 3 unknown pages may go, or a fifth of a worker's."""
    return settings.model_copy(update={"max_unknown_pages": 3, "max_unknown_share": 0.2})


@pytest.mark.parametrize(
    ("known", "unknown", "deleted"), [(0, 3, True), (0, 4, False), (16, 4, True), (15, 4, False)]
)
async def test_more_unknown_pages_than_crashes_leave_are_held(
    known: int, unknown: int, deleted: bool, cautious: ServiceLimits, catalog: Catalog
) -> None:
    theirs, lost = make_pages(known), make_pages(unknown)
    worker = StubWorker(theirs | lost)
    swept = PageSweep(ServiceContext.create(catalog, worker, cautious))
    if theirs:
        await add_session(catalog, *theirs)
    if deleted:
        assert [await swept.sweep("stub") for _ in range(2)] == [0, unknown]
        assert not swept.held
        return
    for _ in range(3):
        with pytest.raises(ManyUnknownPages, match="KVRECALL_SERVICE__MAX_UNKNOWN_SHARE=1"):
            await swept.sweep("stub")
    assert len(worker.pages) == known + unknown
    assert swept.held == {"stub": unknown}
    await add_session(catalog, *lost)  # the catalog has its data back
    assert await swept.sweep("stub") == 0
    assert not swept.held


async def test_a_person_lets_held_pages_go_with_a_setting(
    cautious: ServiceLimits, catalog: Catalog
) -> None:
    worker = StubWorker(make_pages(9))
    limits = cautious.model_copy(update={"max_unknown_share": 1.0})
    swept = PageSweep(ServiceContext.create(catalog, worker, limits))
    assert [await swept.sweep("stub") for _ in range(2)] == [0, 9]
    assert not worker.pages
