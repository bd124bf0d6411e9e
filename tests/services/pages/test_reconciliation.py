"""Sessions that workers hold and the catalog does not know are deleted; those in creation are not."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from kvrecall.domain.errors import ManyUnknownSessions, WorkerLost
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.testing import StubWorker, open_catalog
from services.catalog.base import Catalog
from services.context import ServiceContext
from services.pages import reconciliation
from services.pages.reconciliation import Reconciler

Build = Callable[[StubWorker], Reconciler]
HELLO = Message("user", "hello there")


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(orphan_seconds=0.3, reconcile_seconds=3600, drain_seconds=5)


def open_request(session: str) -> pb.OpenRequest:
    return pb.OpenRequest(spec=pb.SessionSpec(session=session, epoch=1, budget=64))


async def test_a_session_whose_creation_broke_off_is_deleted_after_a_while(harness) -> None:
    kept = await harness.session()

    reached = asyncio.Event()

    async def killed(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    harness.catalog.sessions.create = killed
    creation = asyncio.create_task(harness.session())
    await reached.wait()
    (orphan,) = harness.worker.sessions.keys() - {kept}
    del harness.catalog.sessions.create
    await harness.reconcile()
    assert harness.worker.sessions.keys() == {kept, orphan}, "it may be in creation"
    await asyncio.sleep(0.35)
    await harness.reconcile()
    assert harness.worker.sessions.keys() == {kept}
    creation.cancel()


async def test_a_creation_that_ends_after_its_session_was_deleted_loses_nothing(harness) -> None:
    create = harness.catalog.sessions.create
    reached, gate = asyncio.Event(), asyncio.Event()

    async def late(*args: object) -> None:
        reached.set()
        await gate.wait()
        await create(*args)

    harness.catalog.sessions.create = late
    creation = asyncio.create_task(harness.session())
    await reached.wait()
    await asyncio.sleep(0.35)
    await harness.reconcile()
    assert not harness.worker.sessions
    gate.set()
    session = await creation
    assert (await harness.say(session, HELLO)).turn == 1


async def test_an_open_that_arrives_after_the_deletion_is_undone(harness) -> None:
    session = await harness.session()
    await harness.service.delete(session)
    await harness.worker.open(open_request(session))
    await asyncio.sleep(0.35)
    await harness.reconcile()
    assert not harness.worker.sessions


async def test_what_another_process_stored_is_deleted_at_once_but_for_shared_pages(harness) -> None:
    session = await harness.session()
    harness.worker.stored = {session, "s_unknown"}
    await harness.reconcile()
    assert harness.worker.stored == {session}
    assert harness.worker.dropped == [("s_unknown", 0)]


class Recording(StubWorker):
    """Records the requests for lists of sessions."""

    def __init__(self, stored: Iterable[str] = ()) -> None:
        super().__init__(stored)
        self.lists: list[pb.ListSessionsRequest] = []
        self.pages: list[int] = []

    async def list_sessions(self, worker: str, request: pb.ListSessionsRequest) -> pb.SessionList:
        copy = pb.ListSessionsRequest()
        copy.CopyFrom(request)
        self.lists.append(copy)
        found = await super().list_sessions(worker, request)
        self.pages.append(len(found.sessions))
        return found


@pytest.fixture
async def catalog() -> AsyncIterator[Catalog]:
    async with open_catalog() as catalog:
        yield catalog


@pytest.fixture
def build(catalog: Catalog, settings: ServiceLimits) -> Build:
    """build(worker): a reconciler of an empty catalog and this worker."""
    return lambda worker: Reconciler(ServiceContext.create(catalog, worker, settings))


async def test_lists_come_in_bounded_pages(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciliation, "_PAGE_SESSIONS", 7)
    worker = Recording(stored=[f"s_{number:03}" for number in range(40)])
    assert await build(worker).reconcile("one") == 40
    assert not worker.stored
    assert max(worker.pages) == 7


async def test_a_worker_is_asked_again_only_for_what_was_opened_since(
    build: Build, settings: ServiceLimits
) -> None:
    worker = Recording()
    reconciler = build(worker)
    await reconciler.reconcile("one")
    assert [(each.stored, each.max_age) for each in worker.lists] == [(False, 0.0), (True, 0.0)]
    assert worker.lists[0].min_age == pytest.approx(settings.orphan_seconds)
    worker.lists.clear()
    await reconciler.reconcile("one")
    (again,) = worker.lists
    assert again.min_age == pytest.approx(settings.orphan_seconds)
    assert again.max_age == pytest.approx(settings.orphan_seconds + 10.0, abs=5.0)
    reconciler.join("one")
    worker.lists.clear()
    await reconciler.reconcile("one")
    assert len(worker.lists) == 2, "it joined anew: all of its sessions"


async def test_a_reconciliation_that_fails_is_made_up_for(build: Build) -> None:
    worker = Recording(stored=["s_1"])
    reconciler = build(worker)
    worker.faults["delete_unknown"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await reconciler.reconcile("one")
    assert await reconciler.reconcile("one") == 1


async def test_a_session_that_is_used_after_it_was_listed_is_deleted_once_it_is_idle(
    build: Build,
) -> None:
    class InUse(Recording):
        """Opens each session that a deletion names, as if its creation were still running."""

        used = True

        async def delete_unknown(
            self, worker: str, request: pb.DeleteUnknownRequest
        ) -> pb.DeleteUnknownResult:
            if self.used:
                await self.open(open_request(request.sessions[0].session))
            return await super().delete_unknown(worker, request)

    worker = InUse()
    await worker.open(open_request("s_1"))
    worker.opened_at["s_1"] = 0.0
    reconciler = build(worker)
    assert await reconciler.reconcile("one") == 0
    assert worker.sessions.keys() == {"s_1"}
    worker.used = False
    worker.opened_at["s_1"] = 0.0
    worker.lists.clear()
    assert await reconciler.reconcile("one") == 1
    assert {each.stored for each in worker.lists} == {False, True}, "all of its sessions again"


async def test_a_worker_that_joins_during_its_reconciliation_is_listed_whole_again(
    build: Build,
) -> None:
    class Joining(Recording):
        """Joins anew while its sessions are listed."""

        async def list_sessions(
            self, worker: str, request: pb.ListSessionsRequest
        ) -> pb.SessionList:
            if not self.lists:
                reconciler.join(worker)
            return await super().list_sessions(worker, request)

    worker = Joining()
    reconciler = build(worker)
    await reconciler.reconcile("one")
    del worker.lists[1:]
    await reconciler.reconcile("one")
    assert [each.stored for each in worker.lists[1:]] == [False, True]


async def test_a_silent_worker_holds_up_no_other(build: Build) -> None:
    class Silent(StubWorker):
        async def list_sessions(
            self, worker: str, request: pb.ListSessionsRequest
        ) -> pb.SessionList:
            if worker == "silent":
                await asyncio.Event().wait()
            return await super().list_sessions(worker, request)

    worker = Silent(stored=["s_1"])
    worker.names = ["silent", "one"]
    reconciler = build(worker)
    reconciler.start()
    for _ in range(500):
        if not worker.stored:
            break
        await asyncio.sleep(0.01)
    assert not worker.stored
    await reconciler.stop()


@pytest.fixture
def cautious() -> ServiceLimits:
    """Limits under which 3 unknown sessions may go, or a fifth of a worker's."""
    return ServiceLimits(
        orphan_seconds=0.3, drain_seconds=5, max_unknown_sessions=3, max_unknown_share=0.2
    )


@pytest.mark.parametrize(
    ("known", "unknown", "deleted"), [(0, 3, True), (0, 4, False), (16, 4, True), (15, 4, False)]
)
async def test_more_unknown_sessions_than_crashes_leave_are_held(
    known: int, unknown: int, deleted: bool, cautious: ServiceLimits, catalog: Catalog
) -> None:
    worker = StubWorker()
    reconciler = Reconciler(ServiceContext.create(catalog, worker, cautious))
    for number in range(known):
        await catalog.sessions.create(make_session(f"s_known{number}"), b"", None)
    worker.stored = {f"s_known{number}" for number in range(known)}
    worker.stored |= {f"s_unknown{number}" for number in range(unknown)}
    if deleted:
        assert await reconciler.reconcile("stub") == unknown
        assert not reconciler.held
        return
    with pytest.raises(ManyUnknownSessions, match="KVRECALL_SERVICE__MAX_UNKNOWN_SHARE=1"):
        await reconciler.reconcile("stub")
    assert len(worker.stored) == known + unknown
    assert reconciler.held == {"stub": unknown}
    for number in range(unknown):  # the catalog has its data back
        await catalog.sessions.create(make_session(f"s_unknown{number}"), b"", None)
    assert await reconciler.reconcile("stub") == 0
    assert not reconciler.held


async def test_a_person_lets_held_sessions_go_with_a_setting(
    cautious: ServiceLimits, catalog: Catalog
) -> None:
    worker = StubWorker()
    worker.stored = {f"s_unknown{number}" for number in range(9)}
    limits = cautious.model_copy(update={"max_unknown_share": 1.0})
    reconciler = Reconciler(ServiceContext.create(catalog, worker, limits))
    assert await reconciler.reconcile("stub") == 9
    assert not worker.stored


def make_session(id: str) -> Session:
    settings = SessionSettings(budget=64, repair_rows=8, method="snapkv")
    return Session(id, 1, settings, 1.0, 1.0, 0, MemoryReport(budget=64))
