"""Report of a run: a table for the terminal, and rows for the result file."""

from rich.console import Console
from rich.table import Table

from faults.findings import FAULTS, WRONG, Findings
from kvrecall_server.reporting.results import Row

# Texts printed for each kind of failure.
SHOWN = 5


def build_rows(findings: Findings) -> list[Row]:
    """Counts over all rounds, as rows of a result file."""
    rows = [
        _row(condition, name, number)
        for condition, counter in findings.counts.items()
        for name, number in sorted(counter.items())
    ]
    rows.append(_row(FAULTS, "all", findings.faults))
    return rows + [_row("wrong", name, len(findings.failures.get(name, []))) for name in WRONG]


def print_report(findings: Findings, console: Console) -> None:
    """Print the counts, and the first texts of each kind of failure."""
    table = Table("", "", "count", title="faults under load")
    for row in build_rows(findings):
        table.add_row(str(row["condition"]), str(row["metric"]), str(row["n"]))
    console.print(table)
    print_failures(findings, console)


def print_failures(findings: Findings, console: Console) -> None:
    """Print the first texts of each kind of failure."""
    for name in WRONG:
        for text in findings.failures.get(name, [])[:SHOWN]:
            console.print(f"{name}: {text}", style="red", soft_wrap=True, markup=False)


def _row(condition: str, metric: str, number: int) -> Row:
    return {"condition": condition, "metric": metric, "unit": "count", "n": number}
