"""A Redis that is down or frozen is skipped, and gets the pending pages when it answers again."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import TierFailedError, TierFullError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier
from tests.kvstore.stored_rows import (
    append,
    delete_from_lowest,
    list_stored,
    name_pages,
    open_session,
    read_all,
    write,
)

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


def is_flushed(store: RowStore) -> bool:
    """Return whether no page is pending."""
    return not store._stack.placement.has_pending()


def test_files_are_durable_while_redis_is_down_and_redis_gets_the_pages_later(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(64)
    one = open_worker("one")
    append(one, "a", rows[:, :, :, :29])
    assert one.flush("a")
    server.kill()
    append(one, "a", rows[:, :, :, 29:])
    assert one.flush("a")
    assert torch.equal(read_all(one, "a"), rows)
    assert one.tiers()["redis"].counters.errors > 0
    server.start()
    until(lambda: is_flushed(one))
    one.check()
    other = open_worker("other")
    open_session(other, "a", rows)
    assert torch.equal(read_all(other, "a"), rows)


def test_without_files_rows_wait_in_memory_and_are_not_reported_as_durable(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(64)
    one = open_worker()
    server.kill()
    append(one, "a", rows)
    assert not one.flush("a")
    assert torch.equal(read_all(one, "a"), rows)
    server.start()
    until(lambda: one.flush("a"))
    one.check()
    other = open_worker()
    open_session(other, "a", rows)
    assert torch.equal(read_all(other, "a"), rows)


def test_a_frozen_redis_delays_one_write_and_no_read(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(61)
    one = open_worker("one", timeout_seconds=0.5)
    server.signal(signal.SIGSTOP)
    append(one, "a", rows)
    assert torch.equal(read_all(one, "a"), rows), "the read does not wait for the write"
    assert one.flush("a")
    writes = one.tiers()["redis"].counters.writes
    append(one, "a", rows)
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
    server.kill()
    append(one, "a", rows)
    assert one.flush("a")
    one.close()
    server.start()
    again = open_worker("one")
    open_session(again, "a", rows)
    assert again.missing_pages("a") == []
    assert torch.equal(read_all(again, "a"), rows)
    until(lambda: is_flushed(again))
    other = open_worker("other")
    open_session(other, "a", rows)
    assert torch.equal(read_all(other, "a"), rows)


def test_a_worker_that_comes_back_late_does_no_harm(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    """It writes what it computed before another one took its session over, and after."""
    rows, later, uncommitted = make_rows(16), make_rows(16, seed=1), make_rows(16, seed=2)
    one = open_worker("one")
    ids = write(one, "a", rows)
    server.kill()
    append(one, "a", uncommitted)  # in its files, but never committed
    append(one, "a", later)
    assert one.flush("a")
    server.start()
    other = open_worker("other")
    other.open("a", ids)
    append(other, "a", later)
    assert other.flush("a")
    expected = torch.cat([rows, later], 3)
    until(lambda: is_flushed(one))
    append(one, "a", rows)
    assert one.flush("a")
    assert torch.equal(read_all(other, "a"), expected)
    other.release("a")
    open_session(one, "a", expected)
    assert one.missing_pages("a") == []
    assert torch.equal(read_all(one, "a"), expected)
    delete_from_lowest(one, name_pages(expected, 8)[3:])
    one.close()
    again = open_worker("one")
    open_session(again, "a", expected)
    assert 3 in again.repair_pages("a") or torch.equal(read_all(again, "a"), expected), (
        "missing or right, never other rows"
    )


def test_pages_that_two_workers_wrote_while_redis_was_down_are_stored_there_once(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until, layout: PageLayout
) -> None:
    rows = make_rows(24)
    workers = [open_worker("one"), open_worker("other")]
    server.kill()
    for store in workers:
        append(store, "a", rows)
        assert store.flush("a"), "in its files"
    server.start()
    for store in workers:
        until(lambda store=store: is_flushed(store))
    third = open_worker()
    open_session(third, "a", rows)
    assert torch.equal(read_all(third, "a"), rows)
    lowest = third._stack.tiers.lowest
    assert isinstance(lowest, RedisTier)
    assert lowest.count_used_bytes() == 3 * layout.page_bytes


def test_pages_that_redis_lost_come_back_from_a_workers_files(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows = make_rows(48)
    one = open_worker("one")
    ids = write(one, "a", rows)
    one.close_session("a")
    server.client.flushall()
    other = open_worker("other")
    other.open("a", ids)
    assert other.missing_pages("a") == list(range(6))
    one.open("a", ids)
    assert one.missing_pages("a") == []
    assert one.flush("a")
    assert is_flushed(one)
    assert torch.equal(read_all(other, "a"), rows)
    assert other.missing_pages("a") == []


def test_a_full_tier_keeps_no_page_of_a_discarded_turn(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: NvmeTier, *_: Any, **__: Any) -> None:
        raise TierFullError("no space is left on the device")

    rows = make_rows(24)
    later = make_rows(8, seed=1)
    store = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")])
    ids = write(store, "a", rows)
    with monkeypatch.context() as patch:
        patch.setattr(NvmeTier, "put", full)
        append(store, "a", later)
        assert not store.flush("a")
        assert torch.equal(read_all(store, "a"), torch.cat([rows, later], 3))
        with pytest.raises(TierFailedError, match="end with the process"):
            store.close()
    again = RowStore(layout, [NvmeTier(tmp_path / "rows")])
    again.open("a", name_pages(torch.cat([rows, later], 3), layout.page_tokens))
    assert again.missing_pages("a") == [3]
    assert again.list_pages() == set(ids)
    again.close()


def test_a_session_continues_from_memory_while_redis_is_down(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    rows, more = make_rows(32), make_rows(32, seed=1)
    one = open_worker("one")
    ids = write(one, "a", rows)
    server.kill()
    one.open("a", ids)
    append(one, "a", more)
    assert one.flush("a")
    with pytest.raises(TierFailedError):
        open_session(one, "unseen", make_rows(8, seed=2))
    assert one.sessions() == ["a"]
    server.start()
    until(lambda: is_flushed(one))
    names = list(server.client.scan_iter("*:p:*"))
    assert len(names) == 8
    assert all(server.client.ttl(name) > 24 * 3600 for name in names), "as if flushed just now"
    other = open_worker("other")
    open_session(other, "a", torch.cat([rows, more], 3))
    assert torch.equal(read_all(other, "a"), torch.cat([rows, more], 3))


def test_pages_of_a_turn_that_was_cut_off_live_a_day(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    one = open_worker("one")
    rows = make_rows(32)
    append(one, "a", rows)
    until(lambda: len(list(server.client.scan_iter("*:p:*"))) == 4)
    lives = [server.client.ttl(name) for name in server.client.scan_iter("*:p:*")]
    day = 24 * 3600
    assert all(day - 600 < life <= day for life in lives)
    assert one.flush("a")
    assert all(server.client.ttl(name) > day for name in server.client.scan_iter("*:p:*"))


def test_a_failed_deletion_is_retried_later(
    open_worker: OpenWorker, make_rows: MakeRows, server: Any, until: Until
) -> None:
    one = open_worker("one")
    rows = make_rows(29)
    ids = write(one, "a", rows)
    one.open("b", ids[:2])
    one.close_session("a")
    server.kill()
    one.delete(ids).result()
    assert one._through.writer.has_refused()
    server.start()
    until(lambda: not one._through.writer.has_refused())
    one.check()
    assert list_stored(one, 1) == set(ids[:2]), "of the files"
    lives = [server.client.pttl(name) for name in server.client.scan_iter("*:p:*")]
    assert sorted(life > 120_000 for life in lives) == [False, True, True], "in Redis it ends soon"
    assert torch.equal(read_all(one, "b"), rows[:, :, :, :16])
