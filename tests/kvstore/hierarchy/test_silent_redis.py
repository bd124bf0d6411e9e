"""A Redis that is silent is treated like one that is gone, and nothing waits for it twice."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier
from tests.kvstore.stored_rows import append, write

MakeRows = Callable[..., Tensor]
Until = Callable[..., None]


@pytest.fixture
def server(redis_process: Callable[..., Any]) -> Any:
    return redis_process()


@pytest.fixture
def open_worker(
    server: Any, layout: PageLayout, tmp_path: Path
) -> Iterator[Callable[..., RowStore]]:
    """Factory `open_worker(files)`: a store over RAM, Redis and, if given, that directory."""
    opened: list[RowStore] = []

    def open_one(files: str | None = None) -> RowStore:
        above: list[Tier] = [NvmeTier(tmp_path / files)] if files else []
        tiers = [RamTier(64 * layout.page_bytes), *above, RedisTier(server.url, layout)]
        opened.append(RowStore(layout, tiers))
        return opened[-1]

    yield open_one
    server.signal(signal.SIGCONT)
    for store in opened:
        store.close()


@pytest.mark.parametrize("files", ["files", None])
def test_turns_end_and_statistics_are_answered_while_redis_is_silent(
    open_worker: Callable[..., RowStore],
    make_rows: MakeRows,
    server: Any,
    files: str | None,
    until: Until,
) -> None:
    store = open_worker(files)
    for seed, session in enumerate("abcdefgh"):
        write(store, session, make_rows(29, seed=seed))
    server.signal(signal.SIGSTOP)
    began = monotonic()
    for session in "abcdefgh":
        append(store, session, make_rows(3))
        assert store.flush(session) == (files is not None), "durable in the files, if there are any"
    assert monotonic() - began < 15, "one timeout of 2 s for all of them"
    began = monotonic()
    for _ in range(100):
        assert store.usage()["redis"] > 0
        assert "redis" in store.failures()
        assert store.tiers()["redis"].used_bytes > 0
    for session in "abcdefgh":
        assert store.gather(session, torch.arange(32)).shape[3] == 32
    assert monotonic() - began < 5
    server.signal(signal.SIGCONT)
    until(lambda: store.flush("a") and not store.failures(), seconds=30)
    until(lambda: not store._stack.placement.has_pending(), seconds=30)
