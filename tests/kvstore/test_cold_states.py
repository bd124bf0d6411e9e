"""The random operations of `test_store_states.py` on a store whose pages move into a bucket all the time."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvstore.format.page import PageId
from kvstore.store import RowStore
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.bucket_process import BucketProcess
from tests.conftest import until
from tests.kvstore.test_store_states import LAYOUT, RAM_PAGES, SEGMENT_PAGES, RowStoreMachine

# A page moves as soon as it was not used for so long: while the next operations run.
_AFTER_SECONDS = 0.02


class ColdStoreMachine(RowStoreMachine):
    """A page is stored if the store has it, wherever it lies."""

    create_bucket: Callable[[], BucketAddress]

    def __init__(self) -> None:
        self.address = type(self).create_bucket()
        super().__init__()

    def open_store(self) -> RowStore:
        nvme = NvmeTier(self.directory, segment_bytes=SEGMENT_PAGES * LAYOUT.page_bytes)
        self.bucket = BucketTier(self.address, LAYOUT)
        store = RowStore(
            LAYOUT,
            [RamTier(RAM_PAGES * LAYOUT.page_bytes), nvme],
            read_batch_pages=2,
            bucket=self.bucket,
            cold_after_seconds=_AFTER_SECONDS,
        )
        until(lambda: self.bucket.is_listed, "the bucket is listed")
        return store

    def list_stored(self) -> set[PageId]:
        ids = list(self.rows)
        return {id for id, has in zip(ids, self.store.contains(ids), strict=True) if has}

    def require_empty(self) -> None:
        assert self.list_stored() == set()
        until(lambda: self.store.usage() == {"ram": 0, "nvme": 0, "bucket": 0}, "all is deleted")


def test_rows_are_right_wherever_they_lie(
    bucket_server: BucketProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine(ColdStoreMachine):
        create_bucket = partial(bucket_server.create_bucket, monkeypatch)

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=15, stateful_step_count=25, deadline=None)
    )
