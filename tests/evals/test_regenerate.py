"""Result files that are made again by the commands that they hold."""

import sys
from pathlib import Path

import pytest

from evals.errors import BadCommand
from evals.regenerate import command_of, main
from kvrecall_server.reporting.results import Results, read_results

SMALL = "--lengths 160 --depths 0 --limit 1 --methods streaming_llm --budget 64 --block 64 --fresh"


def result_file(folder: Path, command: str) -> Path:
    path = folder / "made.json"
    Results("suite", command, 0, {}, {}, "reference", []).write(path)
    return path


def regenerate(monkeypatch: pytest.MonkeyPatch, *arguments: Path | str) -> None:
    monkeypatch.setattr("sys.argv", ["regenerate", *map(str, arguments)])
    main()


def test_a_file_is_made_again_and_only_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new"
    file = result_file(tmp_path, f"kvrecall eval passkey {SMALL} --json old.json --processes 3")
    regenerate(monkeypatch, file, "--out", out, "--processes", "1")
    made = read_results(out / "made.json")
    answers = {row["method"]: row["mean"] for row in made.results if "metric" not in row}
    assert answers == {"full": 1, "streaming_llm": 0}
    assert command_of(out / "made.json", None) == command_of(file, None)
    (out / "made.json").write_text("kept")
    monkeypatch.setattr(sys, "executable", "none")
    regenerate(monkeypatch, file, "--out", out)
    assert (out / "made.json").read_text() == "kept"


def test_recordings_are_found_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "data" / "locomo").mkdir(parents=True)
    airline = tmp_path / "data" / "runs" / "airline.json"
    airline.parent.mkdir()
    airline.touch()
    command = "python -m kvrecall_server.cli eval planted --json a.json --data locomo --k 8 --fresh"
    file = result_file(tmp_path, f"{command} --result-data airline.json --processes 3")
    assert command_of(file, tmp_path / "data") == [
        "planted",
        *("--data", str(tmp_path / "data" / "locomo"), "--k", "8"),
        *("--result-data", str(airline)),
    ]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("python benchmarks/tiers.py", "not made by kvrecall eval, but by: python benchmarks"),
        ("kvrecall eval fidelity --data missing", "no missing in"),
    ],
)
def test_a_command_that_cannot_run_is_refused(command: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadCommand, match=reason):
        command_of(result_file(tmp_path, command), tmp_path)
