"""A worker counts its own work; two gateways that look at it change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.metrics.page import Metrics
from workers.metrics.catalogue import JOBS, WORKER
from workers.model.embedder import Embedder
from workers.rpc.catalog_binding import CatalogBinding
from workers.rpc.service import WorkerService

Samples = dict[tuple[str, ...], float]


def read(metrics: Metrics) -> Samples:
    """Samples by name and the values of the labels but `worker`."""
    return {
        (
            sample.name.removeprefix("kvrecall_"),
            *(value for label, value in sample.labels.items() if label != "worker"),
        ): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


@pytest.fixture
def worker(make_worker: Callable[..., Any], tmp_path: Path) -> Any:
    """A worker of two slots whose metrics are read at each look."""
    made = make_worker(slots=2, block_tokens=24, recent=8)
    WorkerService(made.scheduler, Embedder(), "tiny", CatalogBinding(tmp_path / "catalog-id"))
    return made


def test_turns_are_counted_as_steps_jobs_and_time(worker: Any, words: Callable[..., str]) -> None:
    worker.open("s", method="snapkv", budget=60)
    done = worker.turn("s", words(80), max_tokens=8)
    samples = read(worker.engine.metrics)
    prefilled = done.prompt_tokens
    assert samples["worker_prefilled_tokens_total",] == prefilled
    assert samples["worker_step_seconds_count", "prefill"] == -(-prefilled // 24)
    assert samples["worker_step_seconds_count", "decode"] == done.output_tokens - 1
    assert samples["worker_batch_sessions_sum",] == done.output_tokens - 1
    for kind in ("open", "turn", "decode", "swap"):
        assert samples["worker_busy_seconds_total", kind] > 0
    assert samples["worker_busy_seconds_total", "repair"] == 0
    for kind in JOBS:
        assert samples["worker_jobs", kind, "running"] == 0
    memory = worker.memory("s")
    assert samples["worker_active_rows",] == max(memory.active_rows)
    assert samples["worker_active_bytes",] == memory.active_bytes
    assert samples["worker_budget_rows",] == 60
    assert samples["worker_evicted_tokens",] == memory.length - max(memory.active_rows)
    computed = memory.length + memory.unsettled
    assert samples["eviction_rows_total", "snapkv"] == computed - 60


def test_sessions_are_swapped_when_there_are_more_than_slots(
    worker: Any, words: Callable[..., str]
) -> None:
    for name in "abc":
        worker.open(name)
        worker.turn(name, words(20), max_tokens=2)
    samples = read(worker.engine.metrics)
    assert samples["worker_swaps_total", "in"] == 3
    assert samples["worker_swaps_total", "out"] == 1
    assert samples["worker_swap_seconds_count",] == 3
    assert (samples["worker_slots",], samples["worker_slots_in_use",]) == (2, 2)
    assert samples["worker_sessions",] == 3


def test_a_waiting_job_counts_as_queued(worker: Any, words: Callable[..., str]) -> None:
    seen: list[Samples] = []
    worker.open("s")
    worker.submit(
        "s", words(20), max_tokens=4, emit=lambda _: seen.append(read(worker.engine.metrics))
    )
    worker.turn("s", words(5, seed=1), max_tokens=2)
    first = seen[0]
    assert first["worker_jobs", "turn", "running"] == 1
    assert read(worker.engine.metrics)["worker_jobs", "turn", "queued"] == 0


def test_tiers_are_counted_where_they_are_the_workers_own(
    worker: Any, words: Callable[..., str]
) -> None:
    worker.open("s")
    worker.turn("s", words(200), max_tokens=2)
    samples = read(worker.engine.metrics)
    used = worker.engine.store.usage()
    for tier in ("ram", "nvme"):
        assert samples["tier_bytes", tier] == used[tier] > 0
        assert samples["tier_failed", tier] == 0
    assert samples["tier_limit_bytes", "ram"] > 0
    assert ("tier_limit_bytes", "nvme") not in samples, "no limit is set"
    assert samples["tier_free_bytes", "nvme"] > 0
    assert ("tier_free_bytes", "ram") not in samples
    assert samples["worker_pending_pages",] == 0
    assert samples["worker_undurable_pages",] == 0
    assert not any(name.startswith("shared_tier") for name, *_ in samples)


def test_readings_do_not_change_what_they_read(worker: Any, words: Callable[..., str]) -> None:
    worker.open("s")
    worker.turn("s", words(60), max_tokens=3)
    first, second = read(worker.engine.metrics), read(worker.engine.metrics)
    changing = {"tier_free_bytes"}
    assert {key: value for key, value in first.items() if key[0] not in changing} == {
        key: value for key, value in second.items() if key[0] not in changing
    }


def test_a_worker_has_fewer_than_a_thousand_series(worker: Any, words: Callable[..., str]) -> None:
    worker.open("s", method="snapkv", budget=60)
    worker.turn("s", words(120), max_tokens=4)
    worker.repair("s", "a signal")
    assert len(read(worker.engine.metrics)) < 1000
    names = [family.name for family in WORKER]
    assert len(set(names)) == len(names)
