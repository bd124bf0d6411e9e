"""Settings of tiers: applied to the row store, or refused in one line without a password."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall_server.app.settings import Settings
from kvrecall_server.app.tiers import durable_tiers
from kvrecall_server.app.wiring import build_store
from kvstore.format.page import PageLayout
from kvstore.tiers.bucket.address import BucketAddress
from reference import MODEL_PATH
from tests.kvstore.page_ids import make_ids
from workers.model.loader import load_model


def test_codecs_of_tiers_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVRECALL_STORE__NVME_CODEC", "int8")
    model = load_model(MODEL_PATH)
    store = build_store(model, tmp_path, 1 << 26, Settings().store)
    rows = torch.randn(
        store.layout.rows_shape(128), generator=torch.Generator().manual_seed(1), dtype=model.dtype
    )
    store.append("a", rows, make_ids(range(2)))
    store.flush("a")
    used = store.usage()
    store.close()
    assert used["ram"] == 2 * store.layout.page_bytes
    assert used["nvme"] <= 0.55 * used["ram"]


def test_tiers_stay_within_their_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str
) -> None:
    monkeypatch.setenv("KVRECALL_STORE__NVME_BYTES", "100000")
    monkeypatch.setenv("KVRECALL_STORE__REDIS_BYTES", "200000")
    monkeypatch.setenv("KVRECALL_STORE__REDIS_URL", redis_url)
    tiers = durable_tiers(PageLayout(1, 1, 8, torch.float32, "model A"), tmp_path, Settings().store)
    assert [tier.limit_bytes for tier in tiers] == [100_000, 200_000]
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (
            "RAM_CODEC",
            "int8",
            "no tier may store rows less exactly than the tier below it, got ram: INT8, nvme: RAW",
        ),
        ("NVME_CODEC", "int4", "store.nvme_codec"),
        ("REDIS_URL", "redis://:hunt#er2@somewhere", "this Redis URL cannot be read"),
        (
            "REDIS_URL",
            "redis://:hunter2@127.0.0.1:1",
            "rows cannot be stored: redis://127.0.0.1:1 failed",
        ),
        ("COLD_URL", "https://somewhere", "KVRECALL_STORE__COLD_URL: this URL of a bucket cannot"),
        ("COLD_URL", "s3://key:hunter2@pages", "must not have credentials"),
        ("COLD_AFTER_SECONDS", "0", "store.cold_after_seconds"),
    ],
)
def test_impossible_tiers_are_refused_in_one_line(
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    value: str,
    why: str,
) -> None:
    monkeypatch.setenv(f"KVRECALL_STORE__{name}", value)
    found = command("serve", "--data", tmp_path, "--port", "0")
    assert found.exit_code == 2
    assert why in found.output
    assert "Traceback" not in found.output
    assert "hunt" not in found.output


def test_a_bucket_beside_redis_is_refused_by_name(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVRECALL_STORE__COLD_URL", "s3://pages")
    monkeypatch.setenv("KVRECALL_STORE__REDIS_URL", "redis://127.0.0.1:1")
    found = command("serve", "--data", tmp_path, "--port", "0")
    assert found.exit_code == 2
    assert "KVRECALL_STORE__COLD_URL: pages move into a bucket from a worker's own files" in (
        " ".join(found.output.split())
    )


def test_a_bucket_of_the_environment_is_behind_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bucket: BucketAddress, until: Any
) -> None:
    monkeypatch.setenv("KVRECALL_STORE__COLD_URL", str(bucket))
    monkeypatch.setenv("KVRECALL_STORE__COLD_ENDPOINT", str(bucket.endpoint))
    monkeypatch.setenv("KVRECALL_STORE__COLD_AFTER_SECONDS", "0.2")
    monkeypatch.setenv("KVRECALL_STORE__COLD_BYTES", "100000000")
    model = load_model(MODEL_PATH)
    store = build_store(model, tmp_path, 1 << 26, Settings().store)
    rows = torch.zeros(store.layout.rows_shape(128), dtype=model.dtype)
    store.append("a", rows, make_ids(range(2)))
    assert store.flush("a")
    until(lambda: store.usage()["nvme"] == 0, "the pages moved")
    status = store.tiers()["bucket"]
    assert (status.used_bytes, status.limit_bytes) == (2 * store.layout.page_bytes, 100_000_000)
    store.close()
