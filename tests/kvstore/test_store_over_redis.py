"""A row store whose lowest tier is Redis: other processes open its sessions."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor

from kvstore.errors import MissingPageError, StaleWriterError
from kvstore.format.codec import Codec
from kvstore.format.commit_history import CommitHistory, CommitPoint
from kvstore.format.page import PageKey, PageLayout
from kvstore.format.page_table import SharedPages
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier

MakeRows = Callable[..., Tensor]
OpenStore = Callable[..., RowStore]


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


def commits(*points: tuple[int, int]) -> CommitHistory:
    return CommitHistory([CommitPoint(*point) for point in points])


def delete_from_lowest(store: RowStore, keys: list[PageKey]) -> None:
    """Delete pages from the lowest tier without the stores."""
    store._stack.tiers.lowest.delete(keys)


def nvme(store: RowStore) -> Tier:
    return store._stack.tiers.all[1]


def read_all(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


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
        store.open(session, epoch=1, length=0)
        store.append(session, new)
    assert all(torch.equal(read_all(store, session), new) for session, new in rows.items())
    store.truncate("a", 32)
    store.append("a", rows["a"][:, :, :, 32:])
    store.delete("b")
    store.check()
    store.close()
    again = open_store(nvme)
    for session in ("a", "tenant/ü}"):
        again.open(session, epoch=2, length=rows[session].shape[3])
        assert again.missing_pages(session) == []
        assert torch.equal(read_all(again, session), rows[session])
    with pytest.raises(StaleWriterError):
        again.open("b", epoch=2, length=0)
    again.append("a", make_rows(7, seed=1))
    again.check()
    for session in again.sessions():
        again.delete(session)
    assert set(again.usage().values()) == {0}


def test_another_worker_reads_flushed_pages(open_store: OpenStore, make_rows: MakeRows) -> None:
    rows = make_rows(32)
    one = open_store("one")
    one.append("a", rows)
    assert one.flush("a")
    other = open_store("other")
    other.open("a", epoch=1, length=32)
    assert torch.equal(read_all(other, "a"), rows)
    assert other.tiers()["redis"].counters.hits == 4
    assert torch.equal(read_all(other, "a"), rows)
    assert other.tiers()["redis"].counters.hits == 4


def test_int8_pages_are_the_same_in_another_worker(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(29)
    one = open_store("one", Codec.INT8)
    one.append("a", rows)
    decoded = read_all(one, "a")
    one.flush("a")
    other = open_store("other", Codec.INT8)
    other.open("a", epoch=1, length=24)
    assert torch.equal(read_all(other, "a"), decoded[:, :, :, :24])
    assert not torch.equal(decoded[:, :, :, :24], rows[:, :, :, :24])
    assert torch.equal(decoded[:, :, :, 24:], rows[:, :, :, 24:]), "an unfinished page is exact"


def test_a_worker_that_lost_a_session_may_delete_it(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(32)
    one = open_store("one")
    other = open_store("other")
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    assert one.flush("a")
    other.open("a", epoch=2, length=32)
    other.append("a", rows)
    assert other.flush("a")
    with pytest.raises(StaleWriterError):
        one.open("a", epoch=1, length=32)
    one.delete("a")
    other.append("a", rows)
    with pytest.raises(StaleWriterError):
        other.flush("a")
    third = open_store("third")
    assert list(third._stack.tiers.lowest.stored()) == [], (
        "pages that were queued at the deletion are not written"
    )


def test_a_worker_that_lost_a_session_is_refused_and_changes_nothing(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(24)
    others = make_rows(16, seed=5)
    one = open_store("one")
    other = open_store("other")
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    assert one.flush("a")
    one.append("a", others)  # A turn that will not be committed.
    other.open("a", epoch=2, length=24)
    other.append("a", rows[:, :, :, :16])
    assert other.flush("a")
    # The turn's first pages may have been written before the other worker came, or be refused by now.
    with suppress(StaleWriterError):
        one.append("a", others)
    with pytest.raises(StaleWriterError):
        one.flush("a")
    with pytest.raises(StaleWriterError):
        one.append("a", rows)
    with pytest.raises(StaleWriterError):
        one.flush("a")
    with pytest.raises(StaleWriterError):
        one.open("a", epoch=1, length=24)
    one.open("b", epoch=1, length=0)
    one.append("b", rows)
    assert one.flush("b"), "other sessions are not affected"
    expected = torch.cat([rows, rows[:, :, :, :16]], 3)
    assert torch.equal(read_all(other, "a"), expected)
    other.check()
    one.open("a", epoch=3, length=40, history=commits((1, 24), (2, 40)))
    assert torch.equal(read_all(one, "a"), expected)
    one.check()


def test_uncommitted_rows_are_deleted_when_another_worker_opens_the_session(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(64)
    one = open_store("one")
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    one.flush("a")
    open_store("other").open("a", epoch=2, length=24)
    third = open_store("third")
    third.open("a", epoch=3, length=64, history=commits((1, 24), (3, 64)))
    assert third.missing_pages("a") == [3, 4, 5, 6, 7]
    assert torch.equal(third.gather("a", torch.arange(24)), rows[:, :, :, :24])
    one.open("a", epoch=4, length=64, history=commits((1, 24), (3, 64)))
    assert one.missing_pages("a") == [3, 4, 5, 6, 7], "its own copies are not valid"


def test_a_fork_is_read_by_another_worker_and_its_parent_continues(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(29)
    more = make_rows(24, seed=1)
    others = make_rows(20, seed=2)
    one = open_store("one")
    other = open_store("other")
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    one.fork("a", "b", epoch=1, length=24, shared=[SharedPages("a", 3)])
    one.append("b", more)
    assert one.flush("b"), "the shared pages too"
    expected = torch.cat([rows[:, :, :, :24], more], 3)
    one.append("a", others)
    assert one.flush("a")
    one.check()
    other.open("b", epoch=2, length=48, shared=[SharedPages("a", 3)])
    assert torch.equal(read_all(other, "b"), expected)
    other.check()
    one.delete("a", keep_pages=3)
    other.prefetch("b")
    assert torch.equal(read_all(other, "b"), expected)
    assert other.repair_pages("b") == []


def test_a_restored_shared_page_is_restored_for_all_sessions(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(32)
    one = open_store()
    other = open_store()
    one.open("a", epoch=7, length=0)
    one.append("a", rows)
    one.fork("a", "b", epoch=1, length=24, shared=[SharedPages("a", 3)])
    assert one.flush("a")
    one.open("a", epoch=8, length=32)
    delete_from_lowest(other, [PageKey("a", 1)])
    other.open("b", epoch=2, length=24, shared=[SharedPages("a", 3, commits((7, 24)))])
    assert other.missing_pages("b") == [1]
    with pytest.raises(MissingPageError):
        read_all(other, "b")
    other.restore("b", 1, rows[:, :, :, 8:16])
    assert other.flush("b")
    assert torch.equal(read_all(other, "b"), rows[:, :, :, :24])
    third = open_store()
    third.open("a", epoch=9, length=32, history=commits((7, 32)))
    assert torch.equal(read_all(third, "a"), rows)


def test_a_released_session_leaves_no_copies_above_the_shared_tier(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    rows = make_rows(32)
    one = open_store("one")
    other = open_store("other")
    one.open("a", epoch=1, length=0)
    one.append("a", rows)
    one.release("a")
    assert (one.sessions(), one.usage()["ram"], one.usage()["nvme"]) == ([], 0, 0)
    other.open("a", epoch=2, length=32)
    assert torch.equal(read_all(other, "a"), rows)


def test_a_deletion_of_the_unclaimed_clears_only_the_unshared_files(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store("one")
    for session in "abc":
        store.open(session, epoch=1, length=0)
        store.append(session, make_rows(24))
    store.close()
    again = open_store("one")
    other = open_store()
    assert again.unclaimed() == ["a", "b", "c"]
    assert again.delete_unclaimed("b")
    assert again.delete_unclaimed("c", keep_pages=1)
    assert sorted((h.key.session, h.key.index) for h in nvme(again).stored()) == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("c", 0),
    ]
    other.open("b", epoch=2, length=24)
    assert other.missing_pages("b") == []
