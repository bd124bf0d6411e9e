"""Rows of the benchmark of shared beginnings: with short conversations of the reference model."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.beginnings import ALONE, CHANGES, SHARED, Answered, Plan, build_request, build_rows

PLAN = Plan(system=200, messages=300)


def test_a_request_is_compared_with_the_same_one_alone() -> None:
    found = {
        SHARED: [Answered(1.0, 100, 64), Answered(3.0, 100, 64)],
        ALONE: [Answered(2.0, 100, 0), Answered(4.0, 100, 0)],
    }
    rows = build_rows("an edited message", found)
    assert [row["ratio"] for row in rows] == [0.625, 1.0]
    assert [row["cached_share"] for row in rows] == [0.64, 0.0]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_request_begins_as_the_other_does(change: str) -> None:
    before = build_request(PLAN, 7)
    after = CHANGES[change](before, PLAN, 7)
    assert after != before
    assert after.system[:500] == before.system[:500]
    assert after.tools[: len(before.tools)] == before.tools


def test_each_change_is_measured_shared_and_alone(tmp_path: Path) -> None:
    out = tmp_path / "beginnings.json"
    sizes = ["--system", "300", "--messages", "300", "--repeats", "1"]
    assert main(["beginnings", *sizes, "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [row["condition"].rpartition(", ")[2] for row in rows] == [SHARED, ALONE] * len(CHANGES)
    for shared, alone in zip(rows[::2], rows[1::2], strict=True):
        assert shared["cached_share"] > alone["cached_share"] == 0
        assert min(shared["median"], alone["median"]) > 0
