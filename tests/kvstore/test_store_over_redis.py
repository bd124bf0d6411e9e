"""A row store whose lowest tier is Redis: other processes open its sessions."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor

from kvstore.errors import MissingPageError
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis import tier as redis_tier
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
OpenStore = Callable[..., RowStore]
Until = Callable[..., None]


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
def open_store(
    request: pytest.FixtureRequest, layout: PageLayout, tmp_path: Path
) -> Iterator[OpenStore]:
    """Factory `open_store(nvme, codec)`: the store of one process: RAM for two pages, files, Redis.

    `nvme` names the process's directory; without it there are no files.
    """
    url = request.getfixturevalue(request.param)
    namespace = uuid4().hex
    opened: list[RowStore] = []

    def open_one(nvme: str | None = None, codec: Codec = Codec.RAW) -> RowStore:
        files: list[Tier] = [NvmeTier(tmp_path / nvme)] if nvme else []
        tiers = [
            RamTier(2 * layout.page_bytes),
            *files,
            RedisTier(url, layout, namespace=namespace),
        ]
        opened.append(RowStore(layout, tiers, codecs=[codec] * len(tiers)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.mark.parametrize("nvme", [None, "rows"])
def test_sessions_are_reopened_after_a_restart(
    open_store: OpenStore, make_rows: MakeRows, nvme: str | None
) -> None:
    rows = {
        session: make_rows(tokens, seed=tokens)
        for session, tokens in (("a", 48), ("b", 8), ("tenant/ü}", 24))
    }
    store = open_store(nvme)
    for session, new in rows.items():
        append(store, session, new)
    assert all(torch.equal(read_all(store, session), new) for session, new in rows.items())
    store.truncate("a", 32)
    append(store, "a", rows["a"][:, :, :, 32:])
    store.check()
    store.close()
    again = open_store(nvme)
    for session, expected in rows.items():
        open_session(again, session, expected)
        assert again.missing_pages(session) == []
        assert torch.equal(read_all(again, session), expected)
    append(again, "a", make_rows(7, seed=1))
    again.check()


def test_another_worker_reads_flushed_pages(open_store: OpenStore, make_rows: MakeRows) -> None:
    rows = make_rows(32)
    ids = write(open_store("one"), "a", rows)
    other = open_store("other")
    assert other.contains(ids) == [True] * 4
    other.open("a", ids)
    assert torch.equal(read_all(other, "a"), rows)
    assert other.tiers()["redis"].counters.hits == 4
    assert torch.equal(read_all(other, "a"), rows)
    assert other.tiers()["redis"].counters.hits == 4


def test_pages_that_two_workers_write_are_stored_once(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    rows, more = make_rows(32), make_rows(8, seed=1)
    one, other = open_store("one"), open_store("other")
    ids = write(one, "a", rows)
    sent = other.tiers()["redis"].counters.written_bytes
    write(other, "b", torch.cat([rows, more], 3))
    assert other.tiers()["redis"].counters.written_bytes - sent == layout.page_bytes
    assert len(list_stored(one)) == 5
    assert set(ids) < list_stored(one)
    lowest = other._stack.tiers.lowest
    assert isinstance(lowest, RedisTier)
    assert lowest.count_used_bytes() == 5 * layout.page_bytes
    assert torch.equal(read_all(other, "b"), torch.cat([rows, more], 3))


def test_int8_pages_are_the_same_in_another_worker(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(29)
    one = open_store("one", Codec.INT8)
    ids = write(one, "a", rows)
    decoded = read_all(one, "a")
    other = open_store("other", Codec.INT8)
    other.open("a", ids)
    assert torch.equal(read_all(other, "a"), decoded[:, :, :, :24])
    assert not torch.equal(decoded[:, :, :, :24], rows[:, :, :, :24])
    assert torch.equal(decoded[:, :, :, 24:], rows[:, :, :, 24:]), "an unfinished page is exact"


def test_a_worker_that_lost_a_session_changes_nothing(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows, others = make_rows(24), make_rows(16, seed=5)
    one, other = open_store("one"), open_store("other")
    ids = write(one, "a", rows)
    append(one, "a", others)  # a turn that will not be committed
    other.open("a", ids)
    append(other, "a", rows[:, :, :, :16])
    assert other.flush("a")
    append(one, "a", others)
    assert one.flush("a")
    one.release("a")
    expected = torch.cat([rows, rows[:, :, :, :16]], 3)
    assert torch.equal(read_all(other, "a"), expected)
    other.check()
    open_session(one, "a", expected)
    assert torch.equal(read_all(one, "a"), expected)
    one.check()


def test_a_session_that_begins_as_another_is_read_by_another_worker(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(29)
    more = make_rows(24, seed=1)
    one, other = open_store("one"), open_store("other")
    ids = write(one, "a", rows)
    one.open("b", ids)
    append(one, "b", more)
    assert one.flush("b")
    expected = torch.cat([rows[:, :, :, :24], more], 3)
    append(one, "a", make_rows(20, seed=2))
    assert one.flush("a")
    one.check()
    open_session(other, "b", expected)
    assert torch.equal(read_all(other, "b"), expected)
    other.check()
    one.close_session("a")
    other.prefetch("b")
    assert torch.equal(read_all(other, "b"), expected)
    assert other.repair_pages("b") == []


def test_a_restored_page_is_restored_for_all_workers(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(32)
    one, other = open_store(), open_store()
    ids = write(one, "a", rows)
    one.close_session("a")
    delete_from_lowest(other, ids[1:2])
    assert one._stack.tiers.memory is not None
    one._stack.tiers.memory.delete(ids)
    one.open("a", ids)
    other.open("b", ids[:3])
    assert other.missing_pages("b") == one.missing_pages("a") == [1]
    with pytest.raises(MissingPageError):
        read_all(other, "b")
    other.restore("b", 1, rows[:, :, :, 8:16])
    assert other.flush("b")
    assert torch.equal(read_all(other, "b"), rows[:, :, :, :24])
    assert torch.equal(read_all(one, "a"), rows)
    assert one.missing_pages("a") == []


def test_a_released_session_leaves_no_copies_above_the_shared_tier(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(32)
    one, other = open_store("one"), open_store("other")
    ids = name_pages(rows, 8)
    append(one, "a", rows)
    one.release("a")
    assert (one.sessions(), one.usage()["ram"], one.usage()["nvme"]) == ([], 0, 0)
    other.open("a", ids)
    assert torch.equal(read_all(other, "a"), rows)


def test_a_released_session_leaves_the_copies_that_another_one_holds(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    one = open_store("one")
    ids = write(one, "a", make_rows(32))
    one.open("b", ids[:2])
    one.release("a")
    assert list_stored(one, 1) == set(ids[:2])
    assert len(list_stored(one)) == 4


def test_deleted_pages_end_in_redis_after_a_while_unless_they_are_used(
    open_store: OpenStore, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(redis_tier, "_CONDEMNED_MILLISECONDS", 3000)
    one, other = open_store("one"), open_store("other")
    rows = make_rows(32)
    ids = write(one, "a", rows)
    one.close_session("a")
    assert len(one.delete(ids).result()) == 4
    assert list_stored(one, 1) == set(), "files let them go at once"
    other.open("b", ids[:2])
    until(lambda: list_stored(other) == set(ids[:2]))
    assert torch.equal(read_all(other, "b"), rows[:, :, :, :16])


def test_only_pages_of_unshared_files_are_listed(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    one, without_files = open_store("one"), open_store()
    ids = write(one, "a", make_rows(24))
    write(without_files, "b", make_rows(16, seed=1))
    assert one.list_pages() == set(ids)
    assert without_files.list_pages() == set()
