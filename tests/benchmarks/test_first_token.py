"""Rows of the benchmark of first tokens: with a short history of the reference model."""

import json
from pathlib import Path

from benchmarks.__main__ import main
from benchmarks.first_token import DEFAULT, FULL, build_rows


def test_turns_are_compared_with_the_full_caches_of_the_same_turn() -> None:
    rows = build_rows(100, {FULL: [1.0, 2.0, 4.0], DEFAULT: [1.5, 2.0, 8.0]})
    assert [row["ratio"] for row in rows] == [1.0, 1.5]


def test_both_sessions_are_measured_in_every_turn(tmp_path: Path) -> None:
    out = tmp_path / "first-token.json"
    sizes = ["--histories", "300", "--turns", "2", "--words", "20", "--answer", "4"]
    assert main(["first-token", *sizes, "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [row["condition"].partition(",")[0] for row in rows] == [FULL, DEFAULT]
    assert all(row["n"] == 2 and row["median"] > 0 for row in rows)
