"""The suites' results in the terminal: methods down, budgets or lengths across."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from kvrecall.cli.results import Estimate, Results, Row

ACROSS = {"longconv": "share", "fidelity": "share", "passkey": "tokens", "locomo": "episodes"}
"""What stands across in each suite's table."""
_NARROWS = ("depth", "against")
"""Rows with one of these are for the result file: the terminal shows what they are parts of."""


def tables_of(results: Results) -> list[Table]:
    """A table per condition, its means with 95% intervals; what does not vary across has one column."""
    across = ACROSS[results.suite]
    rows = [row for row in results.results if "mean" in row and not any(name in row for name in _NARROWS)]
    tables = []
    for condition in dict.fromkeys(row["condition"] for row in rows):
        tables.append(_table(condition, across, [row for row in rows if row["condition"] == condition]))
    return tables


def _table(condition: str, across: str, rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(row.get(across, "") for row in rows))
    table = Table("method", title=condition, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(str(column), justify="right", no_wrap=True)
    found = {(row["method"], row.get(across, "")): row for row in rows}
    for method in dict.fromkeys(row["method"] for row in rows):
        table.add_row(method, *(_cell(found.get((method, column))) for column in columns))
    return table


def _cell(row: Row | None) -> str:
    return "" if row is None else str(Estimate(row["mean"], row["ci_low"], row["ci_high"], row["n"]))
