"""What an idle session keeps in memory, and that the pages that it shares do not expire."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.format.page_table import SharedPages
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier

MakeRows = Callable[..., Tensor]


def read_all(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def test_a_session_of_whole_pages_keeps_no_unfinished_page_in_memory(
    open_store: Callable[..., RowStore], make_rows: MakeRows
) -> None:
    store = open_store()
    rows = {f"s{number}": make_rows(16, seed=number) for number in range(21)}
    for session, part in rows.items():
        store.append(session, part[:, :, :, :11])
    assert all(store.flush(session) for session in rows)
    assert all(state.behind for state in store._sessions.states())
    for number, session in enumerate(rows):
        if number % 3 == 0:
            store.truncate(session, 8)
        elif number % 3 == 1:
            store.open(session, epoch=1, length=8)
        else:
            store.append(session, rows[session][:, :, :, 11:])
    assert not any(state.behind for state in store._sessions.states())
    for session, part in rows.items():
        assert torch.equal(read_all(store, session), part[:, :, :, : store.length(session)])


def test_rows_that_no_durable_tier_has_stay_in_memory(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    blocked_tier.release.set()
    store = RowStore(layout, [blocked_tier])
    blocked_tier.failing = True
    store.append("a", make_rows(11))
    assert not store.flush("a")
    assert torch.equal(read_all(store, "a"), make_rows(11))
    blocked_tier.failing = False
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), make_rows(11))
    store.close()


def test_the_pages_of_a_parent_do_not_expire_while_a_child_uses_them(
    layout: PageLayout, make_rows: MakeRows, redis_process: Any, tmp_path: Path
) -> None:
    url = redis_process().url

    def open_one(name: str) -> RowStore:
        tiers: list[Tier] = [
            RamTier(64 * layout.page_bytes),
            NvmeTier(tmp_path / name),
            RedisTier(url, layout, ttl_seconds=2.0),
        ]
        return RowStore(layout, tiers)

    one = open_one("one")
    shared = [SharedPages("parent", 2)]
    one.open("parent", epoch=1, length=0)
    one.append("parent", make_rows(16))
    assert one.flush("parent")
    one.fork("parent", "child", epoch=1, length=16, shared=shared)
    for turn in range(25):
        one.append("child", make_rows(1, seed=turn))
        assert one.flush("child")
        time.sleep(0.2)
    assert one.length("child") == 41
    one.close()
    other = open_one("other")
    other.open("child", epoch=2, length=16, shared=shared)
    assert other.missing_pages("child") == []
    other.close()


def test_opening_a_child_restarts_the_life_of_its_parents_pages(
    layout: PageLayout, make_rows: MakeRows, redis_process: Any, until: Callable[..., None]
) -> None:
    process = redis_process()
    store = RowStore(layout, [RamTier(1 << 20), RedisTier(process.url, layout, ttl_seconds=1000.0)])
    store.open("parent", epoch=1, length=0)
    store.append("parent", make_rows(16))
    assert store.flush("parent")
    store.fork("parent", "child", epoch=1, length=16, shared=[SharedPages("parent", 2)])
    store.flush("child")
    names = list(process.client.scan_iter("*{parent}*"))
    store.close()
    for name in names:
        process.client.pexpire(name, 60_000)
    again = RowStore(layout, [RamTier(1 << 20), RedisTier(process.url, layout, ttl_seconds=1000.0)])
    again.open("child", epoch=2, length=16, shared=[SharedPages("parent", 2)])
    again.flush("child")
    until(
        lambda: min(process.client.pttl(name) for name in names) > 60_000,
        "the parent's pages live on",
    )
    again.close()
