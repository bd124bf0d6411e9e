"""A bucket that is silent, away or lost: what is not cold goes on, and no page is wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import MissingPageError, TierFailedError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from tests.bucket_process import BucketProcess
from tests.kvstore.cold_stores import ColdStores
from tests.kvstore.stored_rows import append, list_stored, read_all, write

MakeRows = Callable[..., Tensor]
Until = Callable[..., None]
# Less than the default, for a server that does not answer at all.
SILENT_SECONDS = 1.0


@pytest.fixture
def stores(
    layout: PageLayout,
    tmp_path: Path,
    bucket_process: BucketProcess,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ColdStores]:
    address = bucket_process.create_bucket(monkeypatch)
    made = ColdStores(layout, tmp_path, bucket_process, address, until)
    yield made
    bucket_process.go_on()
    made.close()


def can_read(store: RowStore, session: str, rows: Tensor) -> bool:
    """Return whether the session's rows can be read, which are right then."""
    try:
        found = read_all(store, session)
    except TierFailedError:
        return False
    assert torch.equal(found, rows)
    return True


def test_while_the_bucket_is_silent_sessions_that_are_not_cold_go_on(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    cold, warm = make_rows(40), make_rows(48, seed=1)
    ids = stores.put_old(cold)
    store = stores.open(timeout_seconds=SILENT_SECONDS)
    stores.wait_until_moved(store, ids)
    write(store, "warm", warm[:, :, :, :24])
    stores.server.stop()
    append(store, "warm", warm[:, :, :, 24:])
    assert store.flush("warm")
    assert torch.equal(read_all(store, "warm"), warm)
    store.open("cold", ids)
    assert store.missing_pages("cold") == []
    with pytest.raises(TierFailedError, match="s3://"):
        read_all(store, "cold")
    assert "s3://" in store.failures()["bucket"]
    with pytest.raises(TierFailedError):
        store.repair_pages("cold")
    assert len(store.delete(ids[:0]).result()) == 0
    stores.server.go_on()
    until(lambda: can_read(store, "cold", cold), "cold rows can be read")
    assert store.repair_pages("cold") == []
    until(lambda: not store.failures(), "nothing fails any more")


def test_deletions_wait_for_a_bucket_that_is_silent(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    ids = stores.put_old(make_rows(40))
    store = stores.open(timeout_seconds=SILENT_SECONDS)
    stores.wait_until_moved(store, ids)
    stores.server.stop()
    store.open("a", ids)
    store.close_session("a")
    assert len(store.delete(ids).result()) == 5
    assert store.contains(ids) == [False] * 5
    assert store.list_pages() == set()
    stores.server.go_on()
    until(lambda: stores.list_cold() == set(), "the objects are gone")


def test_a_move_that_was_interrupted_is_finished_later(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    rows = make_rows(60 * 8)
    ids = stores.put_old(rows)
    store = stores.open(timeout_seconds=SILENT_SECONDS)
    until(stores.list_cold, "some pages are in the bucket")
    stores.server.stop()
    until(lambda: "bucket" in store.failures() or not list_stored(store), "the bucket fails")
    stores.server.go_on()
    stores.wait_until_moved(store, ids)
    store.open("a", ids)
    assert torch.equal(read_all(store, "a"), rows)


def test_a_store_opens_while_the_bucket_is_away_and_finds_its_pages_later(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    cold, warm = make_rows(40), make_rows(24, seed=1)
    store, ids = stores.open_moved(cold)
    store.close()
    stores.server.stop()
    again = stores.open(timeout_seconds=SILENT_SECONDS)
    write(again, "warm", warm)
    assert torch.equal(read_all(again, "warm"), warm)
    # A new prompt's pages: nobody waits for the bucket to know that they are new.
    assert again.contains(ids) == [False] * 5
    with pytest.raises(TierFailedError, match="s3://"):
        again.open("cold", ids)
    stores.server.go_on()
    until(lambda: again.contains(ids) == [True] * 5, "the bucket is listed")
    again.open("cold", ids)
    assert torch.equal(read_all(again, "cold"), cold)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_lost_bucket_leaves_pages_missing_which_are_written_again(
    stores: ColdStores, make_rows: MakeRows, until: Until, restarted: bool
) -> None:
    rows = make_rows(40)
    store, ids = stores.open_moved(rows)
    if restarted:
        store.close()
    stores.server.delete_bucket(stores.address)
    if restarted:
        store = stores.open()
    store.open("a", ids)
    with pytest.raises(MissingPageError, match="computed again"):
        read_all(store, "a")
    assert store.repair_pages("a") == list(range(5))
    for index, page in enumerate(rows.split(8, 3)):
        store.restore("a", index, page)
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    assert list_stored(store) == set(ids)
    store.check()


def test_a_server_that_was_killed_and_comes_back_empty_costs_the_pages_alone(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    cold = make_rows(40)
    store, ids = stores.open_moved(cold)
    stores.server.kill()
    store.open("a", ids)
    with pytest.raises(TierFailedError):
        read_all(store, "a")
    stores.server.start()
    stores.server.create(stores.address)
    until(lambda: find_missing(store, "a") == list(range(5)), "the pages are known to be lost")
    for index, page in enumerate(cold.split(8, 3)):
        store.restore("a", index, page)
    assert torch.equal(read_all(store, "a"), cold)
    assert store.flush("a")


def find_missing(store: RowStore, session: str) -> list[int] | None:
    """Indices of the missing pages; None while that cannot be said."""
    try:
        return store.repair_pages(session)
    except TierFailedError:
        return None
