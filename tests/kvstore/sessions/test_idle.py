"""What an idle session keeps in memory, and that the pages of sessions do not expire."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.format.page import PageId, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier
from tests.kvstore.stored_rows import append, get_pages, read_all, write

MakeRows = Callable[..., Tensor]


def test_a_session_of_whole_pages_keeps_no_unfinished_page_in_memory(
    open_store: Callable[..., RowStore], make_rows: MakeRows
) -> None:
    store = open_store()
    rows = {f"s{number}": make_rows(16, seed=number) for number in range(21)}
    for session, part in rows.items():
        append(store, session, part[:, :, :, :11])
    assert all(store.flush(session) for session in rows)
    assert all(state.behind for state in store._sessions.states())
    for number, session in enumerate(rows):
        if number % 3 == 0:
            store.truncate(session, 8)
        elif number % 3 == 1:
            store.open(session, get_pages(store, session)[:1])
        else:
            append(store, session, rows[session][:, :, :, 11:])
    assert not any(state.behind for state in store._sessions.states())
    for session, part in rows.items():
        assert torch.equal(read_all(store, session), part[:, :, :, : store.length(session)])


def test_rows_that_no_durable_tier_has_stay_in_memory(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    blocked_tier.release.set()
    store = RowStore(layout, [blocked_tier])
    blocked_tier.failing = True
    append(store, "a", make_rows(11))
    assert not store.flush("a")
    assert torch.equal(read_all(store, "a"), make_rows(11))
    blocked_tier.failing = False
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), make_rows(11))
    store.close()


@pytest.fixture
def open_worker(
    layout: PageLayout, redis_process: Callable[..., Any]
) -> Iterator[Callable[..., RowStore]]:
    """Factory `open_worker(ttl_seconds)`: the store of another worker over the same Redis."""
    url = redis_process().url
    opened: list[RowStore] = []

    def open_one(ttl_seconds: float = 1000.0) -> RowStore:
        tiers: list[Tier] = [
            RamTier(64 * layout.page_bytes),
            RedisTier(url, layout, ttl_seconds=ttl_seconds),
        ]
        opened.append(RowStore(layout, tiers))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def get_lives(store: RowStore, pages: Sequence[PageId]) -> list[int]:
    """Milliseconds until pages expire in Redis, negative for one that is not there."""
    tier = store._stack.tiers.lowest
    assert isinstance(tier, RedisTier)
    names = [tier._keys.page(page_id) for page_id in pages]
    lives: list[int] = tier._server.run_pipelined(names, lambda name: ("PTTL", name))
    return lives


def test_pages_do_not_expire_while_a_session_that_has_them_is_flushed(
    open_worker: Callable[..., RowStore], make_rows: MakeRows
) -> None:
    one = open_worker(ttl_seconds=2.0)
    ids = write(one, "parent", make_rows(16))
    one.close_session("parent")
    one.open("child", ids)
    for turn in range(25):
        append(one, "child", make_rows(1, seed=turn))
        assert one.flush("child")
        time.sleep(0.2)
    other = open_worker(ttl_seconds=2.0)
    other.open("child", ids)
    assert other.missing_pages("child") == []


def test_opening_a_session_restarts_the_life_of_its_pages(
    open_worker: Callable[..., RowStore], make_rows: MakeRows, until: Callable[..., None]
) -> None:
    one = open_worker()
    ids = write(one, "a", make_rows(24))
    one.close_session("a")
    one.delete(ids[1:]).result()
    assert min(get_lives(one, ids)) <= 120_000, "condemned"
    other = open_worker()
    other.open("b", ids)
    until(lambda: min(get_lives(one, ids)) > 900_000)
    one.delete(ids[:1]).result()
    other.open("b", ids)
    until(lambda: min(get_lives(one, ids)) > 900_000, "at every opening")


def test_writing_pages_that_are_there_restarts_their_life_before_they_count_as_durable(
    open_worker: Callable[..., RowStore], make_rows: MakeRows
) -> None:
    one, other = open_worker(), open_worker()
    rows = make_rows(24)
    ids = write(one, "a", rows)
    one.close_session("a")
    one.delete(ids).result()
    write(other, "b", rows)
    assert min(get_lives(one, ids)) > 900_000


def test_pages_that_another_worker_deletes_live_on_where_a_session_has_them(
    open_worker: Callable[..., RowStore], make_rows: MakeRows, until: Callable[..., None]
) -> None:
    """A worker that is told to delete a page that it uses keeps it, again at the session's next flush."""
    one, other = open_worker(), open_worker()
    rows = make_rows(24)
    ids = write(one, "a", rows)
    one.close_session("a")
    other.open("b", ids[:2])
    assert other.flush("b")
    one.delete(ids).result()
    other.delete(ids).result()
    until(lambda: min(get_lives(one, ids[:2])) > 900_000)
    assert get_lives(one, ids[2:])[0] <= 120_000
    one.delete(ids).result()  # which comes after what the other one did
    assert max(get_lives(one, ids)) <= 120_000
    assert other.flush("b")
    until(lambda: min(get_lives(one, ids[:2])) > 900_000)
    assert torch.equal(read_all(other, "b"), rows[:, :, :, :16])
