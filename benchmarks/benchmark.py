"""A benchmark as a value: its name, its options, how it measures and how its rows read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from benchmarks.options import PlanT
from kvrecall_server.reporting.results import Row

RESULTS = Path(__file__).parent / "results"


class BadOptions(Exception):
    """Options that cannot be measured here; the text says what to give instead."""


@dataclass(frozen=True)
class Measured:
    """What a benchmark found. `rows` may be a generator: each row is printed when it is there.

    Attributes:
        file: Name of the result file in `benchmarks/results/`.
        model: What was measured, as the result file has it.
        rows: Rows of the result file; none: no file is written.
        seed: Of all that is random.
        versions: Of programs other than Python and its libraries.
        machine: Properties of the machine that the measurement sets.
    """

    file: str
    model: str
    rows: Iterable[Row]
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


def describe(row: Row) -> str:
    """A row as a line of text."""
    if "mean" in row:
        found = f"({row['ci_low']:.3f}-{row['ci_high']:.3f}), " if "ci_low" in row else ""
        metric = row.get("metric", "")
        return f"{row['condition']:<62} {metric:<26} {row['mean']:.3f} {found}n = {row['n']}"
    ratio = f"  {row['ratio']:.3f} x {row['ratio_to']}" if "ratio" in row else ""
    spread = f"{row['median']:>16,.6g} {row['unit']} (p95 {row['p95']:,.6g}, n = {row['n']})"
    return f"{row['condition']:<62} {row['metric']:<26} {spread}{ratio}"


def keep_rows(out: Path, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows of a result file: the measured ones alone."""
    return rows


def never_fails(rows: Sequence[Row]) -> bool:
    """Return False: figures alone are no failure."""
    return False


@dataclass(frozen=True)
class Benchmark(Generic[PlanT]):
    """A measurement that `python -m benchmarks NAME` runs.

    Attributes:
        suite: Its name in result files.
        line: What it measures, in one line.
        plan: A frozen dataclass whose fields are the options, see `options.option`.
        measure: Measures a plan.
        describe: A row as a line of text.
        merge: The result file's rows, from the measured ones and the file that is replaced.
        failed: True where rows are wrong, which is the exit code.
    """

    suite: str
    line: str
    plan: type[PlanT]
    measure: Callable[[PlanT], Measured]
    describe: Callable[[Row], str] = describe
    merge: Callable[[Path, Sequence[Row]], Sequence[Row]] = keep_rows
    failed: Callable[[Sequence[Row]], bool] = never_fails
