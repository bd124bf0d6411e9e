"""Small layouts, reproducible rows, and tiers that can be blocked or made to fail."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import TierFailedError
from kvstore.format.codec import encode_page
from kvstore.format.page import Blob, PageHeader, PageId, PageLayout
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.page_ids import make_id

if TYPE_CHECKING:
    from kvstore.store import RowStore


@pytest.fixture
def layout() -> PageLayout:
    """Pages of 8 tokens: small enough that a few dozen tokens fill several."""
    return PageLayout(
        n_layers=3,
        n_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        fingerprint="model A",
        page_tokens=8,
    )


@pytest.fixture
def make_rows(layout: PageLayout) -> Callable[..., Tensor]:
    """Factory `make_rows(tokens, seed)`: random rows, the same for the same seed."""

    def make(tokens: int, seed: int = 0) -> Tensor:
        return torch.randn(layout.rows_shape(tokens), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def make_page(
    layout: PageLayout, make_rows: Callable[..., Tensor]
) -> Callable[..., tuple[PageId, bytes]]:
    """Factory `make_page(number, chain, written_at)`: the id of `make_id` and its sealed page."""

    def make(number: int, chain: str = "s", written_at: int = 1000) -> tuple[PageId, bytes]:
        page_id = make_id(number, chain)
        rows = make_rows(layout.page_tokens, seed=number)
        return page_id, bytes(encode_page(layout, page_id, rows, written_at=written_at))

    return make


@pytest.fixture
def open_store(layout: PageLayout, tmp_path: Path) -> "Iterator[Callable[..., RowStore]]":
    """Factory `open_store(ram_pages, **nvme settings)`: a store over RAM and NVMe files."""
    from kvstore.store import RowStore

    opened: list[RowStore] = []

    def open_one(
        ram_pages: int = 4,
        layout: PageLayout = layout,
        directory: Path = tmp_path / "rows",
        **settings: Any,
    ) -> RowStore:
        nvme = NvmeTier(directory, **settings)
        store = RowStore(layout, [RamTier(ram_pages * layout.page_bytes), nvme])
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


class BlockedTier:
    """A RAM tier whose writes wait for `release`, and fail while `failing` is set."""

    name = "blocked"
    durable = True
    shared = False
    limit_bytes = None
    life_seconds = None

    def __init__(self) -> None:
        self.release = Event()
        self.failing = False
        self._inner = RamTier(1 << 20)

    @property
    def used_bytes(self) -> int:
        return self._inner.used_bytes

    def get(self, ids: Sequence[PageId]) -> list[Blob | None]:
        return self._inner.get(ids)

    def put(self, pages: Sequence[tuple[PageId, Blob]], *, backed: bool = False) -> None:
        self.release.wait()
        self._require_working()
        self._inner.put(pages, backed=backed)

    def get_device(self) -> None:
        self._require_working()

    def keep(self, ids: Sequence[PageId]) -> None:
        self._require_working()

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        return self._inner.contains(ids)

    def delete(self, ids: Sequence[PageId]) -> None:
        self._require_working()
        self._inner.delete(ids)

    def stored(self) -> Iterator[PageHeader]:
        return self._inner.stored()

    def list_ids(self, written_before: int) -> list[PageId]:
        return self._inner.list_ids(written_before)

    def flush(self) -> None:
        self._require_working()

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def _require_working(self) -> None:
        if self.failing:
            raise TierFailedError("the device does not answer")


@pytest.fixture
def blocked_tier() -> BlockedTier:
    """A tier whose writes wait until its `release` is set."""
    return BlockedTier()
