"""The demo, on a conversation small enough for a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.app.errors import BoundExceeded
from kvrecall.client import Memory, Repair
from kvrecall.demo.configs import DemoConfig
from kvrecall.demo.run import DemoRun, Question, TurnPoint
from kvrecall.demo.summary import check_bound, count_by_age, pause_seconds, summarise

BUDGETED = DemoConfig("budget alone", "snapkv", 64)


def run_with(peaks: list[int], config: DemoConfig = BUDGETED) -> DemoRun:
    memory = Memory(
        session="s_1",
        length=300,
        budget=64,
        active_rows=50,
        peak_rows=max(peaks),
        bound_rows=192,
        active_bytes=1000 * len(peaks),
        evicted_rows=250,
        promoted_rows=0,
        tier_bytes={},
        layer_active_rows=(50,) * len(peaks),
        layer_peak_rows=tuple(peaks),
        layer_bound_rows=(192,) * len(peaks),
        in_slot=True,
    )
    turn = TurnPoint(300, 50, 2000, 0.5, 0.1, generated=True, repairs=(), after_pause=False)
    question = Question("plain", 200, correct=True, text="What?", expected="That.", reply="That.")
    return DemoRun(config, 1, [turn], [question], 0, memory)


def repair(trigger: str, seconds: float, promoted: int) -> Repair:
    return Repair(
        trigger=trigger,
        signal_tokens=8,
        observed_tokens=8,
        candidates=100,
        scored_rows=100,
        share_scanned=1.0,
        promoted=promoted,
        demoted=0,
        seconds=seconds,
        truncated=False,
        hops=1,
        bytes_read=0,
        in_pause=True,
    )


def test_the_demo_prints_its_table_and_writes_report_and_results(
    command: Callable[..., Any], tmp_path: Path, json_lines: Callable[..., Path]
) -> None:
    real = json_lines(
        {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello, Anna."}
    )
    options = (
        "--tokens",
        "500",
        "--budget",
        "64",
        "--repair-rows",
        "16",
        "--pause",
        "0",
        "--out",
        tmp_path,
    )
    found = command("demo", *options, "--file", real)
    assert found.exit_code == 0, found.output
    assert str(tmp_path / "report.html") in found.output
    results = json.loads((tmp_path / "report.json").read_text())
    rows = {row["condition"]: row for row in results["results"] if "mean" in row}
    names = ("full cache", "budget alone", "repair in pauses", "repair in pauses and turns")
    for name in names:
        assert rows[f"{name}: all"]["n"] == rows["full cache: all"]["n"] > 0
        assert name in found.output
    assert all(rows[f"{name}: all"]["active_rows"] <= 64 + 128 for name in names[1:])
    assert rows["full cache: all"]["active_rows"] > 64 + 128
    page = (tmp_path / "report.html").read_text()
    assert f"Real input: {real.name}" in page
    assert page.count("data:image/svg+xml;base64,") == 3
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_a_layer_over_its_bound_fails_loudly() -> None:
    check_bound([run_with([192, 192])])
    with pytest.raises(BoundExceeded, match="layer 1 held 193 rows"):
        check_bound([run_with([192, 193])])
    check_bound([run_with([5000], DemoConfig("full cache", "full", 64))])


def test_answers_are_counted_in_the_age_of_their_fact() -> None:
    questions = [
        Question("plain", age, correct=correct, text="", expected="", reply="")
        for age, correct in ((10, True), (127, False), (128, True), (9000, False))
    ]
    counted = {label: (correct, wrong) for label, correct, wrong in count_by_age(iter(questions))}
    assert counted["<128"] == (1, 1)
    assert counted["<256"] == (1, 0)
    assert counted["8,192+"] == (0, 1)
    assert sum(correct + wrong for correct, wrong in counted.values()) == 4


def test_repairs_of_a_pause_are_separated_by_their_trigger() -> None:
    repairs = (repair("tool_call", 0.25, 3), repair("tool_result", 0.5, 4))
    paused = TurnPoint(300, 50, 2000, 0.5, 0.1, generated=True, repairs=repairs, after_pause=True)
    plain = TurnPoint(400, 50, 2000, 0.5, 0.1, generated=True, repairs=(), after_pause=False)
    assert pause_seconds([paused, plain], "tool_result") == [(300, 0.5)]
    assert paused.promoted == 7


def test_a_summary_holds_the_largest_memory_and_the_median_times() -> None:
    (summary,) = summarise([run_with([60, 61]), run_with([90, 70])], seed=0)
    assert summary.peak_rows == 90
    assert summary.peak_bytes == 160 * 20
    assert summary.answer_seconds == 0.5
    assert summary.exact["all"] is not None
    assert summary.exact["all"].mean == 1
    assert summary.exact["after a tool"] is None
