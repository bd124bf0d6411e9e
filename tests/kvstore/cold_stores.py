"""Stores over files and a bucket, as workers have them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from kvstore.format.codec import Codec, encode_page
from kvstore.format.page import PageId, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.bucket_process import BucketProcess
from tests.kvstore.stored_rows import list_stored, name_pages

Until = Callable[..., None]

LONG_AGO = 1000
"""When the pages of `put_old` were written, in unix seconds: nobody has used them since."""


class ColdStores:
    """Opens the stores of workers that share a bucket. Their pages move after an hour, unless told otherwise."""

    def __init__(
        self,
        layout: PageLayout,
        directory: Path,
        server: BucketProcess,
        address: BucketAddress,
        until: Until,
    ) -> None:
        self.layout = layout
        self.server = server
        self.address = address
        self._directory = directory
        self._until = until
        self._opened: list[RowStore] = []

    def open(
        self,
        worker: str = "one",
        *,
        after_seconds: float = 3600.0,
        limit_pages: int | None = None,
        timeout_seconds: float = 10.0,
        codec: Codec = Codec.RAW,
    ) -> RowStore:
        """A store over RAM for two pages, the worker's files and the bucket."""
        limit = None if limit_pages is None else limit_pages * self.layout.page_bytes
        store = RowStore(
            self.layout,
            [RamTier(2 * self.layout.page_bytes), NvmeTier(self._directory / worker)],
            codecs=[Codec.RAW, codec],
            bucket=BucketTier(
                self.address, self.layout, limit_bytes=limit, timeout_seconds=timeout_seconds
            ),
            cold_after_seconds=after_seconds,
        )
        self._opened.append(store)
        return store

    def put_old(self, rows: Tensor, worker: str = "one") -> list[PageId]:
        """Put the pages of rows into a worker's files, as written long ago; returns their ids."""
        ids = name_pages(rows, self.layout.page_tokens)
        files = NvmeTier(self._directory / worker)
        for page_id, page in zip(ids, rows.split(self.layout.page_tokens, 3), strict=False):
            blob = encode_page(self.layout, page_id, page.contiguous(), written_at=LONG_AGO)
            files.put([(page_id, blob)])
        files.flush()
        files.close()
        return ids

    def open_moved(self, rows: Tensor) -> tuple[RowStore, list[PageId]]:
        """A store whose bucket has the pages of rows, and no longer its files; returns their ids too."""
        ids = self.put_old(rows)
        store = self.open()
        self.wait_until_moved(store, ids)
        return store, ids

    def wait_until_moved(self, store: RowStore, ids: Sequence[PageId]) -> None:
        """Wait until pages are in the bucket and in the files no more."""
        self._until(
            lambda: set(ids) <= self.list_cold() and list_stored(store).isdisjoint(ids),
            "the pages moved",
        )

    def list_cold(self) -> set[PageId]:
        """Ids of the pages in the bucket, asked of the server."""
        return {bytes.fromhex(name.rpartition("/")[2]) for name in self._list_names()}

    def damage(self, page_id: PageId) -> None:
        """Replace a page in the bucket by other bytes."""
        [name] = [each for each in self._list_names() if each.endswith(page_id.hex())]
        self.server.write_object(self.address, name, b"KVRP, but damaged")

    def close(self) -> None:
        for store in self._opened:
            store.close()

    def _list_names(self) -> list[str]:
        return self.server.list_objects(self.address)
