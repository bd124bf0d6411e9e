"""A row store whose truth is in Redis: another process opens it and finds every session."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor

from kvstore.codec import Codec
from kvstore.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis import RedisTier

MakeRows = Callable[..., Tensor]
OpenStore = Callable[..., RowStore]


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
def open_store(request: pytest.FixtureRequest, layout: PageLayout, tmp_path: Path) -> Iterator[OpenStore]:
    """open_store(nvme, codec): RAM with room for two pages, files if `nvme` is given, Redis; as one process has them.

    `nvme` names the process's directory.
    """
    url, namespace = request.getfixturevalue(request.param), uuid4().hex
    opened: list[RowStore] = []

    def open_one(nvme: str | None = None, codec: Codec = Codec.RAW) -> RowStore:
        files: list[Tier] = [NvmeTier(tmp_path / nvme)] if nvme else []
        tiers = [RamTier(2 * layout.page_bytes), *files, RedisTier(url, layout, namespace=namespace)]
        opened.append(RowStore(layout, tiers, codecs=[codec] * len(tiers)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def everything(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


@pytest.mark.parametrize("nvme", [None, "rows"])
def test_sessions_are_found_again(open_store: OpenStore, make_rows: MakeRows, nvme: str | None) -> None:
    rows = {session: make_rows(tokens, seed=tokens) for session, tokens in (("a", 45), ("b", 8), ("tenant/ü}", 19))}
    store = open_store(nvme)
    for session, new in rows.items():
        store.append(session, new)
    assert all(torch.equal(everything(store, session), new) for session, new in rows.items())
    store.truncate("a", 30)
    store.append("a", rows["a"][:, :, :, 30:])
    store.drop("b")
    store.check()
    store.close()
    again = open_store(nvme)
    assert again.sessions() == ["a", "tenant/ü}"]
    assert all(torch.equal(everything(again, session), rows[session]) for session in again.sessions())
    again.append("a", make_rows(7, seed=1))
    again.check()
    again.retain([])
    assert set(again.usage().values()) == {0}


def test_another_worker_reads_what_was_flushed(open_store: OpenStore, make_rows: MakeRows) -> None:
    rows = make_rows(29)
    one = open_store("one")
    one.append("a", rows)
    one.flush("a")
    other = open_store("other")
    assert torch.equal(everything(other, "a"), rows)
    assert other.counters()["redis"].hits == 4
    assert torch.equal(everything(other, "a"), rows)
    assert other.counters()["redis"].hits == 4


def test_int8_pages_are_the_same_in_another_worker(open_store: OpenStore, make_rows: MakeRows) -> None:
    rows = make_rows(29)
    one = open_store("one", Codec.INT8)
    one.append("a", rows)
    kept = everything(one, "a")
    one.flush("a")
    other = open_store("other", Codec.INT8)
    assert torch.equal(everything(other, "a"), kept)
    assert not torch.equal(kept, rows)
    assert torch.equal(kept[:, :, :, 24:], rows[:, :, :, 24:])
