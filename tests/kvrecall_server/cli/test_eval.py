"""`kvrecall eval` from the command line: its result files, equal however it is run."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall_server.cli.eval.app import eval_app

SMALL = (
    "--lengths",
    "160",
    "--depths",
    "0",
    "--depths",
    "1",
    "--limit",
    "2",
    "--methods",
    "streaming_llm random",
    "--budget",
    "64",
    "--block",
    "64",
)


def started(folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "kvrecall_server.cli",
        "eval",
        "passkey",
        "--json",
        str(folder / "out.json"),
        *SMALL,
    ]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finished(folder: Path, *options: str) -> Any:
    """The result file but for its seconds and its command line."""
    process = started(folder, *options)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    found = json.loads((folder / "out.json").read_text())
    rows = [row for row in found["results"] if "metric" not in row]
    return {**found, "command": "", "results": rows}


def units_done(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_a_killed_and_resumed_run_writes_the_same_file(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", "--processes", "1")
    journal = tmp_path / "killed" / "out.journal.jsonl"
    process = started(tmp_path / "killed", "--processes", "2")
    while units_done(journal) < 1:
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    before = units_done(journal)
    assert 1 <= before < 6
    with journal.open("ab") as file:
        file.write(b'{"key": "torn')
    assert finished(tmp_path / "killed", "--processes", "2") == whole
    assert units_done(journal) == 6
    assert [row for row in whole["results"] if row["method"] == "full"]


def test_suites_are_listed_with_their_questions(command: Callable[..., Any]) -> None:
    found = command("eval", "--help")
    assert found.exit_code == 0
    assert all(
        name in found.output
        for name in ("longconv", "passkey", "fidelity", "locomo", "mq-niah", "repository")
    )


def test_every_suite_explains_its_options(command: Callable[..., Any]) -> None:
    suites = [suite.name for suite in eval_app.registered_commands]
    assert {"longconv", "fidelity", "locomo"} <= set(suites)
    for suite in suites:
        found = command("eval", suite, "--help")
        assert found.exit_code == 0, suite
        assert "--seed" in found.output
    assert "METHOD[+one_pass" in command("eval", "longconv", "--help").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("longconv", "--methods", "snapkv+twice"), "no way to build the episodes of snapkv"),
        (("longconv", "--budgets", "2/3"), "is no budget"),
        (("longconv", "--episodes", "many"), "neither a number of episodes nor auto"),
        (("fidelity", "--data", "nowhere.json"), "nowhere.json cannot be read"),
        (("locomo", "--data", "nowhere.json"), "nowhere.json is no LoCoMo file"),
        (
            ("earlier", "--arms", "dreams"),
            "unknown arm 'dreams'; expected one of rows, one-session",
        ),
        (("multiturn", "--kinds", "locomo"), "name its files by --data"),
        (("multiturn", "--places", "front"), "there is no place 'front'"),
        (("mq-niah", "--suite", "4q revisit"), "is no suite of mq-niah"),
        (("mq-niah", "--suite", "revisit", "--k", "8", "--k", "16"), "take one K"),
    ],
)
def test_wrong_options_end_in_one_line(
    command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    found = command("eval", *arguments, "--json", tmp_path / "out.json")
    assert found.exit_code == 2
    assert message in found.output
    assert "Traceback" not in found.output
    assert not (tmp_path / "out.json").exists()


def test_a_report_draws_the_suites_results(
    command: Callable[..., Any], tmp_path: Path, locomo_like: Path
) -> None:
    out = tmp_path / "out.json"
    options = ("--counts", "1", "--counts", "2", "--widths", "2", "--processes", "1")
    found = command("eval", "locomo", "--data", locomo_like, "--json", out, *options)
    assert found.exit_code == 0, found.output
    assert "k-means" in found.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "page.html"
    assert command("report", out, "--out", page).exit_code == 0
    assert "data:image/svg+xml" in page.read_text()


def test_mq_niah_is_shown_by_k_and_drawn(command: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    small = (
        "--limit",
        "1",
        "--tokens",
        "600",
        "--distractors",
        "1",
        "--base",
        "1/6",
        "--processes",
        "1",
    )
    found = command(
        "eval", "mq-niah", "--suite", "2q", "--json", out, "--k", "8", "--k", "24", *small
    )
    assert found.exit_code == 0, found.output
    assert all(
        name in found.output for name in ("across: K", "Refresh", "WrongQ-K", "gain over matched")
    )
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(out.read_text())["results"]
    assert {row["k"] for row in rows if "mean" in row} == {0, 8, 24}
    assert all(
        {"condition", "method", "budget", "active_rows", "ci_low", "n"} <= row.keys()
        for row in rows
        if "k" in row
    )


def test_multiturn_is_shown_by_place_and_drawn(command: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    small = ("--limit", "2", "--turns", "2", "--processes", "1", "--budgets", "1/4", "--seed", "4")
    found = command(
        "eval", "multiturn", "--json", out, "--kinds", "qa", "--methods", "snapkv", *small
    )
    assert found.exit_code == 0, found.output
    assert "qa/end, exact" in found.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(out.read_text())["results"]
    unreported = {row["place"] for row in rows if row.get("unreported")}
    assert {"begin", "middle"} >= unreported
    assert {row["place"] for row in rows if row["measure"] == "kl"} == {"begin", "middle", "end"}


@pytest.fixture
def locomo_like(tmp_path: Path) -> Path:
    """A file in LoCoMo's form."""
    texts = (
        "I planted tomatoes.",
        "Which ones?",
        "The choir sings on Sunday.",
        "I will come to the concert.",
    )
    lines = [
        {"speaker": "AB"[at % 2], "dia_id": f"D1:{at + 1}", "text": text}
        for at, text in enumerate(texts)
    ]
    asked = [
        {
            "question": "When does the choir sing?",
            "answer": "Sunday",
            "evidence": ["D1:3"],
            "category": 4,
        }
    ]
    path = tmp_path / "chat.json"
    conversation = {"speaker_a": "A", "speaker_b": "B", "session_1": lines}
    path.write_text(json.dumps({"conversation": conversation, "qa": asked}))
    return path


@pytest.mark.parametrize("suite", ["longconv", "mq-niah"])
def test_an_unknown_codec_is_refused_in_one_line(
    command: Callable[..., Any], tmp_path: Path, suite: str
) -> None:
    found = command("eval", suite, "--json", tmp_path / "out.json", "--codec", "raw int4")
    assert (found.exit_code, "'int4' is no codec" in found.output) == (2, True)
    assert not list(tmp_path.iterdir())
