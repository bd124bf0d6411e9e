"""One command runs all benchmarks: their names, their options, and the file that is written."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks.benchmark import BadOptions, Benchmark, Measured, describe
from benchmarks.options import option
from kvrecall_server.reporting.results import Row, read_results, speed_row


@dataclass(frozen=True)
class Plan:
    """Options of each type."""

    folder: Path
    seed: int = 3
    sizes: tuple[int, ...] = option((1, 2), "in rows")
    kind: str = option("plain", choices=("plain", "odd"))
    fast: bool = False
    url: str | None = option(None, "of a server")


def measure(plan: Plan) -> Measured:
    """A row for each size."""
    if plan.kind == "odd":
        raise BadOptions("nothing odd is here; give plain")

    def rows() -> Iterator[Row]:
        for size in plan.sizes:
            yield speed_row(f"{plan.folder} {plan.fast} {plan.url}", "m", "seconds", [size])

    return Measured("toy.json", "none", rows(), plan.seed, {"toy": "1"}, {"threads": 7})


TOY = Benchmark(
    "toy", "a toy", Plan, measure, failed=lambda rows: any(row["median"] > 5 for row in rows)
)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy under a name of a real one."""
    monkeypatch.setattr(runner, "load", lambda name: TOY)


def test_options_are_the_plans_fields_and_rows_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "toy.json"
    given = ["--folder", "here", "--sizes", "2", "3", "--sizes", "4", "--fast", "--out", str(out)]
    assert runner.main(["forks", *given]) == 0
    written = read_results(out)
    assert (written.suite, written.model, written.seed) == ("toy", "none", 3)
    assert [row["median"] for row in written.results] == [2, 3, 4]
    assert written.results[0]["condition"] == "here True None"
    assert written.versions["toy"] == "1"
    assert written.machine["threads"] == 7
    assert capsys.readouterr().out.splitlines() == [describe(row) for row in written.results]


def test_defaults_are_the_plans_and_a_failure_is_the_exit_code(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "toy.json")]
    assert runner.main(["forks", "--folder", "x", *out]) == 0
    assert [row["median"] for row in read_results(tmp_path / "toy.json").results] == [1, 2]
    assert runner.main(["forks", "--folder", "x", "--sizes", "6", *out]) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "name one of ahead, beginnings, "),
        (["unknown"], "invalid choice: 'unknown'"),
        (["forks"], "required: --folder"),
        (["forks", "--folder", "x", "--kind", "other"], "invalid choice: 'other'"),
        (["forks", "--folder", "x", "--kind", "odd"], "nothing odd is here; give plain"),
    ],
)
def test_a_wrong_command_is_explained(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        runner.main(given)
    assert said in capsys.readouterr().err


def test_the_help_has_types_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["forks", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--sizes SIZES [SIZES ...] in rows; default: 1 2" in text
    assert "--kind {plain,odd} default: plain" in text


def test_all_benchmarks_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    assert runner.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(runner.MODULES)
    assert all(len(line.split()) > 3 for line in lines)


def test_a_mean_is_described_with_its_interval_where_it_has_one() -> None:
    mean = {"condition": "warm", "metric": "tokens", "mean": 3.5, "n": 4}
    assert describe(mean).split() == ["warm", "tokens", "3.500", "n", "=", "4"]
    assert "3.500 (3.000-4.000), n = 4" in describe(mean | {"ci_low": 3.0, "ci_high": 4.0})
