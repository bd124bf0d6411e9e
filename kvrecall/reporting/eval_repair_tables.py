"""MQ-NIAH and the call sites in the terminal: conditions down, K across; gains over matched no-repair beside them."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from kvrecall.reporting.results import Results, Row

SUITES = ("mq-niah", "mq-niah revisit", "mq-niah policies", "mq-niah anytime", "repository")
_APART = ("needles", "method")
_GAIN_AT = 48
_PARTS = ("measure", "partition")
"""Rows with one of these are for the result file and the picture."""


def tables_of(results: Results) -> list[Table]:
    """A table per number of needles and first stage, and the gains at one K in the shape of RepairKV's Table 1."""
    rows = [
        row for row in results.results if "mean" in row and not any(name in row for name in _PARTS)
    ]
    scores = [row for row in rows if "against" not in row]
    gains = [row for row in rows if "against" in row]
    tables = []
    for name, own in _groups(scores).items():
        tables.append(_scores(f"{results.suite} {name}, first stage {own[0]['method']}", own))
        against = [row for row in gains if _name(row) == name]
        tables += [_gains(name, own, against)] if against else []
    return tables


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_name(row), []).append(row)
    return groups


def _name(row: Row) -> str:
    needles = f"{row['needles']}q " if "needles" in row else ""
    return f"{needles}{row['method']}"


def _scores(title: str, rows: Sequence[Row]) -> Table:
    """Conditions down; across K, or what stands in its place: turns, shares of the candidates. "any": without it."""
    across = next(
        (name for name in ("stopped_at", "turn") if any(name in row for row in rows)), "k"
    )
    table = Table(
        title=f"{title}; across: {_ACROSS[across]}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("condition", overflow="fold", min_width=14)
    columns = sorted({row[across] for row in rows if across in row and (across != "k" or row["k"])})
    for column in columns:
        table.add_column(
            f"{column:.0%}" if across == "stopped_at" else str(column),
            justify="right",
            no_wrap=True,
        )
    every = across != "k" and any(_at(row, across) is None for row in rows)
    if every:
        table.add_column("any", justify="right", no_wrap=True)
    for name in dict.fromkeys(_condition(row) for row in rows):
        own = {_at(row, across): row for row in rows if _condition(row) == name}
        # The full cache and the base are the same at every K.
        cells = [
            _cell(own.get(column, own.get(None) if across == "k" else None)) for column in columns
        ]
        table.add_row(name, *cells, *([_cell(own.get(None))] if every else []))
    return table


_ACROSS = {"k": "K", "turn": "turn", "stopped_at": "evicted tokens scored"}


def _at(row: Row, across: str) -> object:
    """Where in its line a row stands; None for one that is the same everywhere."""
    return (row["k"] or None) if across == "k" else row.get(across)


def _condition(row: Row) -> str:
    scan = f", {row['scan']}" if "scan" in row else ""
    return f"{row.get('of', row['condition'])}{scan}"


def _gains(name: str, scores: Sequence[Row], gains: Sequence[Row]) -> Table:
    """Score and gain with its interval, at the K nearest to the paper's 48."""
    k = min({row["k"] for row in gains}, key=lambda one: (abs(one - _GAIN_AT), one))
    title = f"{name}, K = {k}: gain over matched no-repair, case by case"
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for head in ("condition", "score", "gain [95% interval]", "active rows"):
        table.add_column(head, justify="left" if head == "condition" else "right")
    found = {row["of"]: row for row in gains if row["k"] == k}
    for row in scores:
        if row["k"] not in (0, k) or "turn" in row:
            continue
        gain = found.get(row["of"])
        told = (
            f"{gain['mean']:+.3f} [{gain['ci_low']:+.3f}, {gain['ci_high']:+.3f}]" if gain else ""
        )
        table.add_row(row["of"], f"{row['mean']:.3f}", told, f"{row['active_rows']:,.0f}")
    return table


def _cell(row: Row | None) -> str:
    """The mean alone: of so many columns no terminal has room for the intervals."""
    return "" if row is None else f"{row['mean']:.2f}"
