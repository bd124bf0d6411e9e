"""Rows of the benchmark of ranks: the workers take the same turns of the reference model."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ranks.arm import WorkerEnded, start_arm
from benchmarks.ranks.benchmark import build_rows, name_arms
from benchmarks.ranks.program import DEFAULT, FULL
from benchmarks.ranks.sizes import Sizes
from benchmarks.subjects import Timed

ALONE, _, DIVIDED = name_arms(2)


def test_turns_are_compared_with_the_same_turn_of_one_process() -> None:
    times = {
        ALONE: [Timed(100, 11, 1.0, 1.0), Timed(100, 11, 2.0, 1.0)],
        DIVIDED: [Timed(100, 11, 0.5, 2.0), Timed(100, 11, 1.0, 4.0)],
    }
    prefill, _, decode, other = build_rows(FULL, times, ALONE)
    assert (prefill["condition"], prefill["median"]) == (f"{FULL}: {ALONE}", 75)
    assert (decode["median"], other["median"]) == (10, 3.75)
    assert (other["ratio"], other["ratio_to"]) == (0.375, ALONE)


def test_all_workers_are_measured_with_both_methods(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    sizes = ["--turns", "2", "--turn-tokens", "150", "--output-tokens", "3", "--budget", "96"]
    assert main(["ranks", *sizes, "--out", str(out)]) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    conditions = [f"{method}: {arm}" for method in (FULL, DEFAULT) for arm in name_arms(2)]
    assert list(dict.fromkeys(row["condition"] for row in written["results"])) == conditions
    assert all(row["n"] == 1 and row["median"] > 0 for row in written["results"])
    assert written["machine"]["threads"] == 2


def test_a_model_that_ranks_cannot_divide_is_no_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["ranks", "--ranks", "3"])
    assert "which 3 ranks cannot have equal parts of" in capsys.readouterr().err


def test_a_worker_that_does_not_start_ends_the_measurement(tmp_path: Path) -> None:
    sizes = Sizes(str(tmp_path / "nothing"), 1, 96, 512, 64)
    with pytest.raises(WorkerEnded, match="its error is above"), start_arm(1, tmp_path, sizes):
        pass
