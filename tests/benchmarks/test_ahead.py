"""Rows of the benchmark of prefill ahead: with short outputs of the reference model."""

import json
from pathlib import Path

from benchmarks.__main__ import main
from benchmarks.ahead import AT_ONCE, REPORTED, Answered, Plan, build_rows


def test_the_ratio_is_that_of_pairs() -> None:
    found = {
        REPORTED: [Answered("a", 1.0), Answered("b", 1.0)],
        AT_ONCE: [Answered("a", 2.0), Answered("b", 10.0)],
    }
    rows = build_rows(found, Plan(), 500)
    assert [row.get("ratio") for row in rows] == [0.3, None]


def test_sizes_are_measured_reported_and_not(tmp_path: Path) -> None:
    out = tmp_path / "ahead.json"
    sizes = ["--context", "200", "--outputs", "600", "--repeats", "1", "--pause", "2"]
    assert main(["ahead", *sizes, "--pieces", "8", "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [row["condition"] for row in rows] == [REPORTED, AT_ONCE]
    assert min(row["median"] for row in rows) > 0
