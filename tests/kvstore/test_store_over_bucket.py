"""A row store whose pages go into a bucket when nobody uses them."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import CorruptPageError, TierSettingsError
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.redis.tier import RedisTier
from tests.bucket_process import BucketProcess
from tests.kvstore.cold_stores import ColdStores
from tests.kvstore.stored_rows import append, list_stored, open_session, read_all, write

MakeRows = Callable[..., Tensor]
Until = Callable[..., None]


@pytest.fixture
def stores(
    layout: PageLayout,
    tmp_path: Path,
    bucket_server: BucketProcess,
    bucket: BucketAddress,
    until: Until,
) -> Iterator[ColdStores]:
    made = ColdStores(layout, tmp_path, bucket_server, bucket, until)
    yield made
    made.close()


def test_pages_that_nobody_used_move_and_come_back_when_their_session_is_read(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    rows = make_rows(40)
    store, ids = stores.open_moved(rows)
    store.open("a", ids)
    assert store.missing_pages("a") == []
    assert torch.equal(read_all(store, "a"), rows)
    until(lambda: list_stored(store) == set(ids), "the pages are back")
    store.check()
    hits = store.tiers()["bucket"].counters.hits
    assert hits >= 5
    assert torch.equal(read_all(store, "a"), rows)
    assert store.tiers()["bucket"].counters.hits == hits
    assert stores.list_cold() == set(ids)


def test_pages_that_are_in_use_stay(stores: ColdStores, make_rows: MakeRows, until: Until) -> None:
    rows = make_rows(64)
    ids = stores.put_old(rows)
    store = stores.open()
    store.open("a", ids[:3])
    until(lambda: list_stored(store) == set(ids[:3]), "only pages of the session are in the files")
    assert stores.list_cold() >= set(ids[3:])
    store.check()


def test_a_session_that_is_open_and_sleeps_goes_on_from_the_bucket(
    stores: ColdStores, make_rows: MakeRows
) -> None:
    rows = make_rows(48)
    store = stores.open(after_seconds=0.2)
    ids = write(store, "a", rows[:, :, :, :40])
    stores.wait_until_moved(store, ids)
    append(store, "a", rows[:, :, :, 40:])
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    store.check()


def test_cold_sessions_are_read_after_a_restart(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    rows = make_rows(40)
    store, _ = stores.open_moved(rows)
    store.close()
    again = stores.open()
    open_session(again, "a", rows)
    assert again.missing_pages("a") == []
    assert torch.equal(read_all(again, "a"), rows)
    until(lambda: again.usage()["bucket"] == 5 * stores.layout.page_bytes, "the bucket is listed")


def test_a_worker_without_the_files_reads_what_another_one_moved(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    rows = make_rows(40)
    other = stores.open("other")
    bucket = other._stack.tiers.bucket
    assert bucket is not None
    until(lambda: bucket.is_listed, "the bucket is listed while it is empty")
    ids = stores.put_old(rows)
    stores.wait_until_moved(stores.open("one"), ids)
    assert other.contains(ids) == [False] * 5
    other.open("a", ids)
    assert other.missing_pages("a") == []
    assert torch.equal(read_all(other, "a"), rows)


def test_a_page_that_moves_again_is_not_sent_again(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    store, ids = stores.open_moved(make_rows(40))
    store.open("a", ids)
    until(lambda: list_stored(store) == set(ids), "the pages are back")
    store.close()
    again = stores.open()
    stores.wait_until_moved(again, ids)
    assert again.tiers()["bucket"].counters.written_bytes == 0


def test_deletions_reach_the_bucket(stores: ColdStores, make_rows: MakeRows, until: Until) -> None:
    store, ids = stores.open_moved(make_rows(40))
    assert store.contains(ids) == [True] * 5
    assert len(store.delete(ids[1:]).result()) == 4
    assert store.contains(ids) == [True, False, False, False, False]
    until(lambda: stores.list_cold() == {ids[0]}, "the objects are gone")
    store.open("a", ids)
    assert store.missing_pages("a") == [1, 2, 3, 4]
    store.close_session("a")
    assert len(store.delete(ids).result()) == 1
    store.close()
    assert stores.list_cold() == set()


def test_pages_of_open_sessions_are_not_deleted_from_the_bucket(
    stores: ColdStores, make_rows: MakeRows
) -> None:
    rows = make_rows(24)
    store = stores.open(after_seconds=0.2)
    ids = write(store, "a", rows)
    stores.wait_until_moved(store, ids)
    store.delete(ids).result()
    assert torch.equal(read_all(store, "a"), rows)
    store.close()
    assert stores.list_cold() == set(ids)


def test_the_list_of_pages_has_those_of_the_bucket_that_are_old_enough(
    stores: ColdStores, make_rows: MakeRows
) -> None:
    cold, warm = make_rows(24), make_rows(16, seed=1)
    store, ids = stores.open_moved(cold)
    young = write(store, "a", warm)
    assert store.list_pages() == {*ids, *young}
    assert store.list_pages(older_than_seconds=60) == set(ids)
    # When another worker wrote a page is not listed, so that counts when it was stored.
    other = stores.open("other")
    stores.wait_until_moved(other, [])
    assert other.list_pages(older_than_seconds=time.time()) == set()


def test_a_page_that_is_written_again_after_its_deletion_stays(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    rows = make_rows(24)
    store, ids = stores.open_moved(rows)
    assert len(store.delete(ids).result()) == 3
    write(store, "a", rows)
    until(lambda: stores.list_cold() == set(), "the objects are gone")
    assert list_stored(store) == set(ids)
    assert torch.equal(read_all(store, "a"), rows)


def test_a_damaged_object_is_missing_and_written_again(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    rows = make_rows(40)
    store, ids = stores.open_moved(rows)
    stores.damage(ids[2])
    store.open("a", ids)
    with pytest.raises(CorruptPageError, match="computed again"):
        read_all(store, "a")
    assert store.repair_pages("a") == [2]
    store.restore("a", 2, rows[:, :, :, 16:24])
    assert store.flush("a")
    assert store.repair_pages("a") == []
    assert torch.equal(read_all(store, "a"), rows)
    until(lambda: ids[2] not in stores.list_cold(), "the damaged object is deleted")


def test_a_page_that_is_damaged_in_the_files_is_read_from_the_bucket(
    stores: ColdStores, make_rows: MakeRows, tmp_path: Path, until: Until
) -> None:
    rows = make_rows(24)
    store, ids = stores.open_moved(rows)
    store.open("a", ids)
    until(lambda: list_stored(store) == set(ids), "the pages are back")
    newest = max((tmp_path / "one").glob("segment-*.kv"))
    with newest.open("r+b") as file:
        file.seek(-100, 2)
        file.write(bytes(100))
    assert torch.equal(read_all(store, "a"), rows)
    assert store.repair_pages("a") == []


def test_int8_pages_are_the_same_after_a_move(stores: ColdStores, make_rows: MakeRows) -> None:
    store = stores.open(after_seconds=0.2, codec=Codec.INT8)
    ids = write(store, "a", make_rows(40))
    expected = read_all(store, "a")
    stores.wait_until_moved(store, ids)
    assert torch.equal(read_all(store, "a"), expected)
    assert store.usage()["bucket"] < 0.7 * 5 * stores.layout.page_bytes


def test_a_full_bucket_leaves_pages_where_they_are(
    stores: ColdStores, make_rows: MakeRows, until: Until
) -> None:
    rows = make_rows(18 * 8)
    ids = stores.put_old(rows)
    store = stores.open(limit_pages=16)
    until(lambda: store.tiers()["bucket"].counters.refused_pages, "the bucket is full")
    assert len(stores.list_cold()) == 16
    assert store.usage()["bucket"] == store.tiers()["bucket"].limit_bytes
    store.open("a", ids)
    assert torch.equal(read_all(store, "a"), rows)


def test_pages_of_another_folder_or_layout_are_unseen(
    stores: ColdStores, make_rows: MakeRows, layout: PageLayout, bucket: BucketAddress
) -> None:
    ids = stores.put_old(make_rows(24))
    stores.wait_until_moved(stores.open(), ids)
    elsewhere = BucketAddress(bucket.bucket, "other", bucket.endpoint, bucket.region)
    other_layout = PageLayout(1, 1, 8, torch.float32, "model B")
    for tier in (BucketTier(elsewhere, layout), BucketTier(bucket, other_layout)):
        assert tier.contains(ids) == [False] * 3
        assert list(tier.stored()) == []
        tier.close()


def test_a_lowest_tier_that_workers_share_is_refused(
    layout: PageLayout, bucket: BucketAddress, redis_url: str
) -> None:
    with pytest.raises(TierSettingsError, match="cannot be moved from redis into a bucket"):
        RowStore(layout, [RedisTier(redis_url, layout)], bucket=BucketTier(bucket, layout))
