"""A Redis that is down or frozen is skipped, and gets the pending pages when it answers again."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import TierError, TierFailedError, TierFullError
from kvstore.format.commit_history import CommitHistory, CommitPoint
from kvstore.format.page import PageKey, PageLayout
from kvstore.format.page_table import SharedPages
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier

MakeRows = Callable[..., Tensor]
Until = Callable[..., None]
OpenWorker = Callable[..., RowStore]


@pytest.fixture
def server(redis_process: Callable[..., Any]) -> Any:
    """A Redis whose data survives a kill."""
    return redis_process("appendonly yes", "appendfsync always")


@pytest.fixture
def open_worker(server: Any, layout: PageLayout, tmp_path: Path) -> Iterator[OpenWorker]:
    """Factory `open_worker(files)`: a store over RAM, Redis and, if given, that directory.

    With the default timeout a machine under load is not taken for a failed Redis.
    """
    opened: list[RowStore] = []

    def open_one(files: str | None = None, timeout_seconds: float = 10.0) -> RowStore:
        above: list[Tier] = [NvmeTier(tmp_path / files)] if files else []
        tiers = [
            RamTier(30 * layout.page_bytes),
            *above,
            RedisTier(server.url, layout, timeout_seconds=timeout_seconds),
        ]
        opened.append(RowStore(layout, tiers))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def read_all(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def is_flushed(store: RowStore) -> bool:
    """Return whether no page is pending."""
    return not store._stack.placement.has_pending()


def test_files_are_durable_while_redis_is_down_and_redis_gets_the_pages_later(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(64)
    one = open_worker("one")
    one.open("a", epoch=1, length=0)
    one.append("a", rows[:, :, :, :29])
    assert one.flush("a")
    server.kill()
    one.append("a", rows[:, :, :, 29:])
    assert one.flush("a")
    assert torch.equal(read_all(one, "a"), rows)
    assert one.tiers()["redis"].counters.errors > 0
    server.start()
    until(lambda: is_flushed(one))
    one.check()
    other = open_worker("other")
    other.open("a", epoch=2, length=64)
    assert torch.equal(read_all(other, "a"), rows)


def test_without_files_rows_wait_in_memory_and_are_not_reported_as_durable(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(64)
    one = open_worker()
    one.open("a", epoch=1, length=0)
    server.kill()
    one.append("a", rows)
    assert not one.flush("a")
    assert torch.equal(read_all(one, "a"), rows)
    server.start()
    until(lambda: one.flush("a"))
    one.check()
    other = open_worker()
    other.open("a", epoch=2, length=64)
    assert torch.equal(read_all(other, "a"), rows)


def test_a_frozen_redis_delays_one_write_and_no_read(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(61)
    one = open_worker("one", timeout_seconds=0.5)
    one.open("a", epoch=1, length=0)
    server.signal(signal.SIGSTOP)
    one.append("a", rows)
    assert torch.equal(read_all(one, "a"), rows), "the read does not wait for the write"
    assert one.flush("a")
    writes = one.tiers()["redis"].counters.writes
    one.append("a", rows)
    assert one.flush("a")
    assert one.tiers()["redis"].counters.writes == writes, (
        "no write waits for it again before a probe succeeds"
    )
    server.signal(signal.SIGCONT)
    until(lambda: is_flushed(one))
    one.check()


def test_a_restarted_worker_flushes_its_pending_pages(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(32)
    one = open_worker("one")
    one.open("a", epoch=1, length=0)
    server.kill()
    one.append("a", rows)
    assert one.flush("a")
    one.close()
    server.start()
    again = open_worker("one")
    again.open("a", epoch=2, length=32)
    assert again.missing_pages("a") == []
    assert torch.equal(read_all(again, "a"), rows)
    until(lambda: is_flushed(again))
    other = open_worker("other")
    other.open("a", epoch=3, length=32, history=commits((1, 32)))
    assert torch.equal(read_all(other, "a"), rows)


def test_pending_pages_never_overwrite_those_of_the_next_owner(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(16)
    later = make_rows(16, seed=1)
    uncommitted = make_rows(16, seed=2)
    one = open_worker("one")
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    assert one.flush("a")
    server.kill()
    one.append("a", uncommitted)  # In its files, but never committed.
    assert one.flush("a")
    server.start()
    other = open_worker("other")
    other.open("a", epoch=2, length=16)
    other.append("a", later)
    assert other.flush("a")
    expected = torch.cat([rows, later], 3)
    until(lambda: is_flushed(one))
    assert torch.equal(read_all(other, "a"), expected)
    one.open("a", epoch=3, length=32, history=commits((1, 16), (2, 32)))
    assert torch.equal(read_all(one, "a"), expected)
    one._stack.tiers.lowest.delete([PageKey("a", 3)])
    other.release("a")
    one.close()
    again = open_worker("one")
    again.open("a", epoch=5, length=32, history=commits((1, 16), (2, 32)))
    assert 3 in again.repair_pages("a") or torch.equal(read_all(again, "a"), expected), (
        "missing or right, never other rows"
    )


def test_a_session_stays_closed_while_uncommitted_rows_cannot_be_truncated(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(48)
    other_rows = make_rows(16, seed=3)
    one = open_worker("one")
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    assert one.flush("a")
    server.kill()
    with pytest.raises(TierError):
        one.open("a", epoch=2, length=24)  # Redis would still have 48 rows for the next owner.
    server.start()
    until(lambda: opens(one, "a", epoch=3, length=24, history=commits((1, 24))))
    one.append("a", other_rows)
    assert one.flush("a")
    other = open_worker("other")
    other.open("a", epoch=4, length=40, history=commits((1, 24), (3, 40)))
    assert torch.equal(read_all(other, "a"), torch.cat([rows[:, :, :, :24], other_rows], 3))


def test_of_the_files_of_a_superseded_worker_only_committed_rows_are_read(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any
) -> None:
    one = open_worker("one")
    other = open_worker("other")
    one.open("a", epoch=1, length=0)
    rows = make_rows(48)
    one.append("a", rows)
    assert one.flush("a")
    other.open("a", epoch=2, length=24)
    other.append("a", make_rows(24, seed=1))
    assert other.flush("a")
    server.client.flushall()
    one.open("a", epoch=3, length=48, history=commits((1, 24), (2, 48)))
    assert one.missing_pages("a") == [3, 4, 5]
    assert torch.equal(one.gather("a", torch.arange(24)), rows[:, :, :, :24])


def test_pending_pages_of_an_earlier_ownership_are_not_flushed_under_a_later_epoch(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(16)
    uncommitted = make_rows(16, seed=1)
    later = make_rows(16, seed=2)
    one = open_worker("one")
    other = open_worker("other")
    for store in (one, other):
        store._through._retry.close()  # Only a flush moves pending pages.
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    assert one.flush("a")
    server.kill()
    one.append("a", uncommitted)
    assert one.flush("a")
    server.start()
    until(lambda: opens(other, "a", epoch=2, length=16))
    assert torch.equal(read_all(other, "a"), rows)
    server.kill()
    other.append("a", later)
    assert other.flush("a")
    server.start()
    history = commits((1, 16), (2, 32))
    until(lambda: opens(one, "a", epoch=3, length=32, history=history))
    assert one.missing_pages("a") == [2, 3]
    one._stack.tiers.clear_failure()
    assert one.flush("a")
    third = open_worker("third")
    third.open("a", epoch=4, length=32, history=history)
    assert third.missing_pages("a") == [2, 3]


def test_a_full_tier_keeps_no_page_of_a_discarded_turn(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: NvmeTier, *_: Any, **__: Any) -> None:
        raise TierFullError("no space is left on the device")

    rows = make_rows(32)
    later = make_rows(8, seed=1)
    store = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")])
    store.append("a", rows[:, :, :, :24])
    assert store.flush("a")
    store.append("a", rows[:, :, :, 24:])  # Of a turn that is discarded; the page is in a file.
    assert store.flush("a")
    with monkeypatch.context() as patch:
        patch.setattr(NvmeTier, "put", full)
        store.open("a", epoch=1, length=24)
        store.append("a", later)
        assert not store.flush("a")
        assert torch.equal(read_all(store, "a"), torch.cat([rows[:, :, :, :24], later], 3))
        with pytest.raises(TierFailedError, match="end with the process"):
            store.close()
    again = RowStore(layout, [NvmeTier(tmp_path / "rows")])
    assert again.length("a") == 24
    again.open("a", epoch=2, length=32, history=commits((0, 24), (1, 32)))
    assert again.missing_pages("a") == [3]
    again.close()


def commits(*points: tuple[int, int]) -> CommitHistory:
    return CommitHistory([CommitPoint(*point) for point in points])


def opens(
    store: RowStore,
    session: str,
    *,
    epoch: int,
    length: int,
    history: CommitHistory | None = None,
) -> bool:
    try:
        store.open(session, epoch=epoch, length=length, history=history)
    except TierFailedError:
        return False
    return True


def test_a_session_continues_from_memory_while_redis_is_down(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(32)
    one = open_worker("one")
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    assert one.flush("a")
    server.kill()
    one.open("a", epoch=2, length=32)
    one.append("a", rows)
    assert one.flush("a")
    with pytest.raises(TierFailedError):
        one.open("unseen", epoch=1, length=0)
    server.start()
    until(lambda: is_flushed(one))
    other = open_worker("other")
    other.open("a", epoch=3, length=64, history=commits((1, 32), (2, 64)))
    assert torch.equal(read_all(other, "a"), torch.cat([rows, rows], 3))
    with pytest.raises(Exception, match="epoch"):
        one.open("a", epoch=2, length=32)


def test_a_failed_deletion_is_retried_later(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    one = open_worker("one")
    one.open("a", epoch=1, length=0)
    rows = make_rows(29)
    one.append("a", rows)
    one.fork("a", "b", epoch=1, length=16, shared=[SharedPages("a", 2)])
    assert one.flush("a")
    server.kill()
    one.delete("a", keep_pages=2)
    assert "a" not in one.sessions()
    until(one._through.writer.has_refused)
    server.start()
    until(lambda: not one._through.writer.has_tasks("a"))  # a retry that runs is not refused yet
    one.check()
    assert sorted(header.key for header in one._stack.tiers.lowest.stored("a")) == [
        PageKey("a", 0),
        PageKey("a", 1),
    ]
    assert torch.equal(read_all(one, "b"), rows[:, :, :, :16])
