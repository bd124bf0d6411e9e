"""A worker that is killed while it moves pages: each lies in the files or in the bucket."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.bucket_process import BucketProcess
from tests.kvstore.cold_stores import ColdStores
from tests.kvstore.stored_rows import read_all


def serve(directory: str, address: BucketAddress) -> None:
    """Hold a store open until the process is killed."""
    layout = PageLayout(3, 2, 4, torch.float32, "model A", page_tokens=8)
    store = RowStore(
        layout,
        [RamTier(1 << 20), NvmeTier(Path(directory))],
        bucket=BucketTier(address, layout),
        cold_after_seconds=3600.0,
    )
    sys.stdin.read()
    store.close()


def test_no_page_is_lost_when_a_worker_is_killed_while_it_moves_them(
    layout: PageLayout,
    tmp_path: Path,
    bucket_server: BucketProcess,
    bucket: BucketAddress,
    until: Callable[..., None],
    make_rows: Callable[..., Tensor],
) -> None:
    stores = ColdStores(layout, tmp_path, bucket_server, bucket, until)
    rows = make_rows(200 * 8)
    ids = stores.put_old(rows)
    arguments = (str(tmp_path / "one"), bucket)
    program = (
        "from kvstore.tiers.bucket.address import BucketAddress\n"
        "from tests.kvstore.test_cold_crash import serve\n"
        f"serve(*{arguments!r})"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        until(stores.list_cold, "some pages are in the bucket")
    finally:
        worker.kill()
        worker.communicate()
    store = stores.open()
    store.open("a", ids)
    assert store.missing_pages("a") == []
    assert torch.equal(read_all(store, "a"), rows)
    store.close()
