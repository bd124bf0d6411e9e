"""Turns that end together share a sync, and a write never waits for another session's sync."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrecall.domain.page_ids import make_random_id
from kvstore.errors import TierFailedError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.segment import SegmentFile
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from workers.engine.stored.store_io import StoreIO
from workers.engine.stored.stored_sessions import StoredSessions
from workers.errors import StorageFailed

LAYOUT = PageLayout(2, 2, 16, torch.float32, "model A")
ROWS = torch.ones(LAYOUT.rows_shape(LAYOUT.page_tokens))


class SlowDisk:
    """Counts syncs of the segment files; the first waits for `release`."""

    def __init__(self, sync: Callable[[SegmentFile], None]) -> None:
        self._sync = sync
        self.syncs = 0
        self.began = Event()
        self.release = Event()

    def sync(self, segment: SegmentFile) -> None:
        self.syncs += 1
        self.began.set()
        self.release.wait(60)
        self._sync(segment)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    slow = SlowDisk(SegmentFile.sync)
    monkeypatch.setattr(SegmentFile, "sync", lambda segment: slow.sync(segment))
    return slow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RowStore]:
    opened = RowStore(LAYOUT, [RamTier(8 << 20), NvmeTier(tmp_path / "rows")])
    yield opened
    opened.close()


@pytest.fixture
def store_io(store: RowStore) -> Iterator[StoreIO]:
    opened = StoreIO(StoredSessions(store))
    yield opened
    opened.close()


def session(name: str) -> Any:
    return SimpleNamespace(name=name, writes=[])


def test_sixteen_turns_that_end_together_share_a_few_syncs(
    store: RowStore, store_io: StoreIO, disk: SlowDisk
) -> None:
    for number in range(17):
        store.open(f"s{number}", [])
    first = session("s16")
    store_io.append(first, 0, ROWS, [make_random_id()], final=True)
    flushes = [store_io.flush(first)]
    assert disk.began.wait(30)
    for number in range(16):
        each = session(f"s{number}")
        store_io.append(each, 0, ROWS, [make_random_id()], final=True)
        flushes.append(store_io.flush(each))
    written = store_io.submit(lambda: None)
    written.result(timeout=30)
    assert not any(flush.done() for flush in flushes), "none is durable yet"
    disk.release.set()
    assert all(flush.result(timeout=60) for flush in flushes)
    assert disk.syncs <= 3


def test_deletions_that_wait_together_share_a_few_syncs(
    store: RowStore, store_io: StoreIO, disk: SlowDisk
) -> None:
    disk.release.set()
    pages = [make_random_id() for _ in range(17)]
    for number, page in enumerate(pages):
        store.append(f"s{number}", ROWS, [page])
        assert store.flush(f"s{number}")
        store.close_session(f"s{number}")
    disk.release.clear()
    disk.began.clear()
    disk.syncs = 0
    deletions = [store_io.submit_durable(partial(store.delete, pages[16:]))]
    assert disk.began.wait(30)
    for page in pages[:16]:
        deletions.append(store_io.submit_durable(partial(store.delete, [page])))
    store_io.submit(lambda: None).result(timeout=30)
    disk.release.set()
    deleted = [deletion.result(timeout=60) for deletion in deletions]
    assert deleted == [{page} for page in [*pages[16:], *pages[:16]]]
    assert store.list_pages() == set()
    assert disk.syncs <= 5


def test_a_cancelled_flush_is_not_begun(store: RowStore, store_io: StoreIO) -> None:
    begun = list[str]()

    def begin() -> Future[bool]:
        begun.append("s")
        return store.begin_flush("s")

    busy = Event()
    store_io.submit(lambda: busy.wait(30))
    assert store_io.submit_durable(begin).cancel()
    busy.set()
    store_io.submit(lambda: None).result(timeout=30)
    assert begun == []


def test_errors_of_the_commit_are_those_of_the_worker(store_io: StoreIO) -> None:
    failed = Future[bool]()
    failed.set_exception(TierFailedError("no answer"))
    with pytest.raises(StorageFailed, match="no answer"):
        store_io.submit_durable(lambda: failed).result(timeout=30)


def test_errors_before_the_commit_are_those_of_the_worker(
    store: RowStore, store_io: StoreIO
) -> None:
    store.close()
    with pytest.raises(StorageFailed):
        store_io.submit_durable(lambda: store.begin_flush("s")).result(timeout=30)
