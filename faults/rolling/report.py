"""Report of a drill for the terminal: a table of its steps, a table of totals, and what is wrong."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from faults.report import SHOWN, print_failures
from faults.rolling.outcome import Outcome
from kvrecall_server.reporting.results import Row


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print steps, totals, and the first texts of each kind of failure."""
    rows = outcome.build_rows()
    steps = Table(
        "step",
        "served again, s",
        "errors seen meanwhile",
        "longest wait, s",
        title="operator's drill",
    )
    totals = Table("total", "", "by status and code")
    for row in rows:
        if row["condition"] == "all":
            totals.add_row(row["metric"], _show(row), show_counts(row.get("errors", {})))
        else:
            steps.add_row(
                row["condition"],
                _show(row),
                show_counts(row["errors"]),
                f"{row['longest_wait']:.1f}",
            )
    console.print(steps)
    console.print(totals)
    for text in [*outcome.lost, *outcome.doubled][:SHOWN]:
        console.print(text, style="red", soft_wrap=True, markup=False)
    print_failures(outcome.findings, console)


def show_counts(counts: Mapping[str, int]) -> str:
    """Counts by name in one line."""
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def _show(row: Row) -> str:
    return f"{row['value']:.1f}" if row["unit"] == "seconds" else str(row["value"])
