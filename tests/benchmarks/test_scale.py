"""The measurement of costs by the number of sessions, with few of them."""

import json
from pathlib import Path

import pytest

from benchmarks.scale.__main__ import add_ratios, main
from benchmarks.scale.rows import measure_start
from kvrecall.reporting.results import Row

SIZES = ("10", "30")


@pytest.mark.parametrize("store", ["sqlite", "redis", "rows", "rows-redis"])
def test_every_operation_is_measured_at_each_size(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scale.json"
    options = ["--workers", "2", "--gateways", "2", "--repetitions", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["scale", store, "--sizes", *SIZES, *options])
    main()
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    conditions = {row["condition"] for row in rows}
    for size in SIZES:
        measured = [row for row in rows if row["sessions"] == int(size)]
        assert {row["condition"] for row in measured} == conditions
        assert all(row["median"] > 0 for row in measured if row["unit"] == "seconds")
    commands = [row["median"] for row in rows if row["metric"] == "Redis commands"]
    assert all(commands) == (store != "sqlite")


def test_a_start_is_measured_by_the_pages_in_the_files(tmp_path: Path) -> None:
    row = measure_start(tmp_path / "files", 600)
    assert row["condition"] == "rows in files: start with 600 pages"
    assert row["median"] > 0


def test_a_row_is_compared_with_the_fewest_sessions() -> None:
    def row(sessions: int, median: float) -> Row:
        return {"condition": "c", "metric": "m", "median": median, "sessions": sessions}

    compared = add_ratios([row(10, 2.0), row(100, 3.0)])
    assert [each["ratio"] for each in compared] == [1.0, 1.5]
    assert {each["ratio_to"] for each in compared} == {"10 sessions"}
