"""The benchmark of tiers, on a few small pages."""

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.tiers.benchmark import TIERS, compare_subjects
from benchmarks.tiers.subjects import Files, Pages, Subject
from kvstore.format.page import PageLayout

LAYOUT = PageLayout(2, 2, 16, torch.float32, "benchmark")
LIMITS = {
    "ram": {"copy in memory"},
    "nvme": {"raw files"},
    "redis": {"plain SET on a socket", "plain GET on a socket"},
}


@pytest.mark.parametrize("tier", LIMITS)
def test_a_tier_and_row_stores_over_it_are_compared_with_the_limit(
    tier: str, tmp_path: Path
) -> None:
    pages = Pages(LAYOUT, 20 * LAYOUT.page_bytes, seed=1)
    rows = list(TIERS[tier](pages, tmp_path, partial(compare_subjects, f"small, {tier}", pages, 1)))
    names = {row["condition"].partition(": ")[2] for row in rows}
    assert names - LIMITS[tier] >= {"tier", "row store"}
    assert {row["metric"] for row in rows} >= {"write", "gather"}
    for row in rows:
        assert row["median"] > 0
        assert row.get("ratio_to", row["condition"].partition(": ")[2]) in LIMITS[tier]


def test_a_ratio_is_the_median_of_those_of_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([float(sum(SECONDS[: i // 2 + i % 2])) for i in range(2 * len(SECONDS))])
    monkeypatch.setattr("benchmarks.tiers.benchmark.perf_counter", lambda: next(clock))
    pages = Pages(LAYOUT, 1, seed=1)
    limit, other = (Subject(name, lambda: None) for name in ("limit", "other"))
    limit_row, other_row = compare_subjects("c", pages, 3, "write", limit, [other])
    assert "ratio" not in limit_row
    assert (other_row["ratio_to"], other_row["ratio"], other_row["n"]) == ("limit", 0.5, 3)
    assert limit_row["median"] == pages.bytes / 2


# Seconds of the limit and the other in four turns, of which the first does not count.
SECONDS = [9, 9, 1, 4, 2, 4, 4, 5]


def test_raw_files_are_read_as_written(tmp_path: Path) -> None:
    pages = Pages(LAYOUT, 20 * LAYOUT.page_bytes, seed=2)
    files = Files(pages, tmp_path)
    files.write().before()
    files.write().run()
    files.read_verified().run()
    assert [bytes(copy) for copy in pages.copy] == [bytes(blob) for blob in pages.blobs]
