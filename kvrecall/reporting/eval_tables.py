"""The suites' results in the terminal: methods down, budgets or lengths across."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from kvrecall.reporting import eval_repair_tables
from kvrecall.reporting.results import Results, Row

_ACROSS = ("share", "tokens", "episodes")
"""What may stand across, the first of these that a condition's rows have."""
_EPISODES = (2, 4, 8, 16)
_PARTS = ("depth", "against")
"""Rows with one of these are for the result file: the terminal shows what they are parts of."""


def tables_of(results: Results) -> list[Table]:
    """A table per condition, its means with 95% intervals; of many numbers of episodes, four."""
    if results.suite in eval_repair_tables.SUITES:
        return eval_repair_tables.tables_of(results)
    rows = [
        row for row in results.results if "mean" in row and not any(name in row for name in _PARTS)
    ]
    counts = {row["episodes"] for row in rows if "episodes" in row}
    shown = counts & set(_EPISODES) or counts
    rows = [row for row in rows if row.get("episodes") in (None, *shown)]
    conditions = dict.fromkeys(row["condition"] for row in rows)
    return [
        _table(condition, [row for row in rows if row["condition"] == condition])
        for condition in conditions
    ]


def _table(condition: str, rows: Sequence[Row]) -> Table:
    across = next((name for name in _ACROSS if name in rows[0]), "")
    columns = list(dict.fromkeys(row.get(across, "") for row in rows))
    title = f"{condition}; across: {across}" if across else condition
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=16)
    for column in columns:
        table.add_column(str(column), justify="right", no_wrap=True)
    found = {(_name(row), row.get(across, "")): row for row in rows}
    for method in dict.fromkeys(_name(row) for row in rows):
        table.add_row(method, *(_cell(found.get((method, column))) for column in columns))
    return table


def _name(row: Row) -> str:
    width = row.get("segment_utterances")
    return f"{row['method']}, segments of {width}" if width else str(row["method"])


def _cell(row: Row | None) -> str:
    return (
        ""
        if row is None
        else f"{row['mean']:.2f}\n[dim]{row['ci_low']:.2f}-{row['ci_high']:.2f}[/]"
    )
