"""Result files, and the interval beside a mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall_server.app.errors import BadResultFile
from kvrecall_server.reporting.results import (
    Results,
    bootstrap,
    build_results,
    command_line,
    read_results,
)

ROWS = [
    {
        "condition": "demo",
        "method": "snapkv",
        "budget": 256,
        "mean": 0.5,
        "ci_low": 0.4,
        "ci_high": 0.6,
        "n": 10,
    },
    {"condition": "demo", "metric": "turn", "unit": "seconds", "median": 0.1, "p95": 0.2, "n": 10},
]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60))
def test_the_interval_holds_the_mean_and_stays_within_the_values(values: list[float]) -> None:
    estimate = bootstrap(values, draws=200)
    assert estimate is not None
    assert min(values) <= estimate.low <= estimate.mean + 1e-12
    assert estimate.mean - 1e-12 <= estimate.high <= max(values)
    assert estimate.n == len(values)


def test_more_values_narrow_the_interval() -> None:
    few = bootstrap([0.0, 1.0] * 5)
    many = bootstrap([0.0, 1.0] * 500)
    assert few is not None
    assert many is not None
    assert many.high - many.low < (few.high - few.low) / 4


def test_no_values_have_no_mean() -> None:
    assert bootstrap([]) is None


def test_a_command_line_has_no_folders_of_the_machine(tmp_path: Path) -> None:
    text = command_line(
        ["/home/user/bin/kvrecall", "replay", "/home/user/my file.json", "--limit", "3"]
    )
    assert text == "kvrecall replay 'my file.json' --limit 3"
    assert command_line(["/somewhere/script.py"]) == "python script.py"
    benchmarks = tmp_path / "benchmarks"
    for folder in (benchmarks, benchmarks / "fuzz"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    commands = {
        "__main__.py": "python -m benchmarks --seed 1",
        "throughput.py": "python -m benchmarks.throughput --seed 1",
        "fuzz/__main__.py": "python -m benchmarks.fuzz --seed 1",
        "fuzz/checks.py": "python -m benchmarks.fuzz.checks --seed 1",
    }
    for file, command in commands.items():
        assert command_line([str(benchmarks / file), "--seed", "1"]) == command


def test_results_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    results = build_results("demo", 7, "some model", ROWS)
    results.write(path)
    assert read_results(path) == results
    assert {"torch", "transformers", "python"} <= set(results.versions)
    assert {"cpu", "cores"} <= set(results.machine)


@pytest.mark.parametrize("text", ["{", "[]", '{"suite": "demo"}', "7"])
def test_another_file_is_refused(command: Callable[..., Any], tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BadResultFile):
        read_results(path)
    found = command("report", path, "--out", tmp_path / "report.html")
    assert found.exit_code == 2
    assert "Traceback" not in found.output


def test_a_report_shows_every_row_and_plots(command: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    page = tmp_path / "report.html"
    Results("demo", "kvrecall demo", 7, {}, {"cpu": "some"}, "some model", ROWS).write(path)
    found = command("report", path, "--out", page)
    assert found.exit_code == 0, found.output
    assert "snapkv" in found.output
    assert "turn" in found.output
    assert page.read_text().count("data:image/svg+xml;base64,") == 2
