"""A store whose sessions bring keys: no row of theirs is anywhere but in memory."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor

from kvstore.errors import LockedPageError
from kvstore.format.codec import Codec
from kvstore.format.encryption import KEY_BYTES
from kvstore.format.page import HEADER_BYTES, PageId, PageLayout, parse_header
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier
from tests.bucket_process import BucketProcess
from tests.kvstore.cold_stores import ColdStores
from tests.kvstore.conftest import BlockedTier
from tests.kvstore.stored_rows import append, delete_from_lowest, name_pages, read_all

MakeRows = Callable[..., Tensor]
OpenStore = Callable[..., RowStore]
Until = Callable[..., None]
KEY = bytes(range(KEY_BYTES))
OTHER_KEY = bytes(reversed(KEY))


@pytest.fixture(params=["files", "Redis", "files and Redis"])
def open_store(
    request: pytest.FixtureRequest, layout: PageLayout, tmp_path: Path
) -> Iterator[OpenStore]:
    """Factory `open_store(codec)`: the store of a process: RAM for two pages, and what lasts."""
    namespace = uuid4().hex
    opened: list[RowStore] = []

    def open_one(codec: Codec = Codec.RAW) -> RowStore:
        for store in opened:
            store.close()
        tiers: list[Tier] = [RamTier(2 * layout.page_bytes)]
        if "files" in request.param:
            tiers.append(NvmeTier(tmp_path / "rows"))
        if "Redis" in request.param:
            url = request.getfixturevalue("redis_url")
            tiers.append(RedisTier(url, layout, namespace=namespace))
        opened.append(RowStore(layout, tiers, codecs=[codec] * len(tiers)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def write(store: RowStore, session: str, rows: Tensor, key: bytes = KEY) -> list[PageId]:
    """Begin a session with these rows, and make its pages durable; returns their ids."""
    store.open(session, [], key)
    append(store, session, rows)
    assert store.flush(session)
    return name_pages(rows, store.layout.page_tokens)


def read_stored(store: RowStore, ids: Sequence[PageId]) -> dict[str, list[bytes]]:
    """Pages as each tier but memory has them, by the tier's name."""
    return {
        tier.name: [bytes(blob) for blob in tier.get(list(ids)) if blob is not None]
        for tier in store._stack.tiers.warm[1:]
    }


@pytest.mark.parametrize("codec", Codec)
def test_rows_are_the_same_from_memory_and_after_a_restart(
    open_store: OpenStore, make_rows: MakeRows, codec: Codec
) -> None:
    store = open_store(codec)
    ids = write(store, "a", make_rows(40))
    rows = read_all(store, "a")
    store = open_store(codec)
    store.open("a", ids, KEY)
    assert torch.equal(read_all(store, "a"), rows)
    store.check()


def test_every_tier_but_memory_has_encrypted_pages(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(40)
    ids = write(store, "a", rows)
    read_all(store, "a")
    plain = rows.split(8, 3)
    for name, pages in read_stored(store, ids).items():
        assert len(pages) == len(ids), name
        for page, content in zip(pages, plain, strict=True):
            assert parse_header(page).is_encrypted
            assert content.contiguous().numpy().tobytes()[:64] not in page[HEADER_BYTES:]


def test_memory_has_plain_pages_which_are_read_in_place(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(16)
    ids = write(store, "a", rows)
    store = open_store()
    store.open("a", ids, KEY)
    held = store.hold_pages("a", [0, 1])
    assert torch.equal(torch.cat(held, 3), rows)
    assert store.memory is not None
    assert not any(parse_header(blob).is_encrypted for blob in store.memory.get(ids) if blob)


def test_pages_are_locked_for_a_session_without_their_key_and_are_written_again(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(24)
    ids = write(store, "a", rows)
    store = open_store()
    store.open("a", ids, OTHER_KEY)
    with pytest.raises(LockedPageError):
        read_all(store, "a")
    assert store.repair_pages("a") == [0, 1, 2]
    for index, page in enumerate(rows.split(8, 3)):
        store.restore("a", index, page)
    assert store.flush("a")
    store = open_store()
    store.open("a", ids, OTHER_KEY)
    assert torch.equal(read_all(store, "a"), rows)


def test_tenants_with_keys_of_their_own_share_a_store(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    texts = {
        "a": (make_rows(24, seed=1), KEY),
        "b": (make_rows(24, seed=2), OTHER_KEY),
        "plain": (make_rows(24, seed=3), b""),
    }
    ids = {name: write(store, name, rows, key) for name, (rows, key) in texts.items()}
    store = open_store()
    for name, (rows, key) in texts.items():
        store.open(name, ids[name], key)
        assert torch.equal(read_all(store, name), rows)
    stored = {name: next(iter(read_stored(store, pages).values())) for name, pages in ids.items()}
    key_ids = {
        name: {parse_header(page).key_id for page in pages} for name, pages in stored.items()
    }
    assert all(len(found) == 1 for found in key_ids.values())
    assert len(set.union(*key_ids.values())) == 3


def test_a_lost_page_is_encrypted_when_it_is_written_again(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(16)
    ids = write(store, "a", rows)
    delete_from_lowest(store, ids)
    assert store.repair_pages("a") == []
    assert store.flush("a")
    store = open_store()
    store.open("a", ids, KEY)
    assert torch.equal(read_all(store, "a"), rows)
    *_, pages = read_stored(store, ids).values()
    assert [parse_header(page).is_encrypted for page in pages] == [True, True]


def test_pages_that_a_tier_refused_are_encrypted_when_it_takes_them(
    layout: PageLayout, make_rows: MakeRows
) -> None:
    lowest = BlockedTier()
    lowest.release.set()
    store = RowStore(layout, [RamTier(8 * layout.page_bytes), lowest])
    lowest.failing = True
    store.open("a", [], KEY)
    rows = make_rows(16)
    append(store, "a", rows)
    assert not store.flush("a")
    # The session is closed: its key is still needed for what it has left behind.
    store.close_session("a")
    lowest.failing = False
    ids = name_pages(rows, layout.page_tokens)
    store.check()
    pages = lowest.get(ids)
    assert [page is not None and parse_header(page).is_encrypted for page in pages] == [True, True]
    store.close()


def test_pages_move_into_a_bucket_as_they_are(
    layout: PageLayout,
    make_rows: MakeRows,
    tmp_path: Path,
    bucket_server: BucketProcess,
    bucket: BucketAddress,
    until: Until,
) -> None:
    stores = ColdStores(layout, tmp_path, bucket_server, bucket, until)
    rows = make_rows(24)
    ids = write(stores.open(), "a", rows)
    stores.close()
    # This process moves them, and has never had their key.
    store = stores.open(after_seconds=0.5)
    stores.wait_until_moved(store, ids)
    moved = BucketTier(bucket, layout, limit_bytes=None, timeout_seconds=10.0)
    assert all(blob is not None and parse_header(blob).is_encrypted for blob in moved.get(ids))
    moved.close()
    store.open("a", ids, KEY)
    assert torch.equal(read_all(store, "a"), rows)
    stores.close()
