"""Tables of the suites' results in the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from kvrecall_server.reporting.results import Results, Row

# Columns of a suite's table: the first of these keys that a condition's rows have.
_ACROSS = ("share", "tokens", "episodes")
_EPISODES = (2, 4, 8, 16)
# Rows with one of these keys are details for the result file; the terminal shows their totals.
_DETAILS = ("depth", "against", "unreported", "turn", "evidence")

# Suites on repair, their columns, and details for the result file and the plot.
_REPAIR_SUITES = (
    "mq-niah",
    "mq-niah revisit",
    "mq-niah policies",
    "mq-niah anytime",
    "repository",
    "planted",
)
_REPAIR_COLUMNS = {"k": "K", "turn": "turn", "stopped_at": "evicted tokens scored"}
_REPAIR_DETAILS = ("measure", "partition", "unreported")
_GAIN_K = 48


def build_tables(results: Results) -> list[Table]:
    """Tables of a suite's means with 95% intervals, one for each condition.

    Of the numbers of episodes, at most four are shown.
    """
    if results.suite in _REPAIR_SUITES:
        return _repair_tables(results)
    rows = [
        row
        for row in results.results
        if "mean" in row and not any(name in row for name in _DETAILS)
    ]
    counts = {row["episodes"] for row in rows if "episodes" in row}
    shown = counts & set(_EPISODES) or counts
    rows = [row for row in rows if row.get("episodes") in (None, *shown)]
    titles = dict.fromkeys(_title(row) for row in rows)
    return [_table(title, [row for row in rows if _title(row) == title]) for title in titles]


def _title(row: Row) -> str:
    """A table's rows have one condition, and one measure where a suite has several."""
    return f"{row['condition']}, {row['measure']}" if "measure" in row else str(row["condition"])


def _table(title: str, rows: Sequence[Row]) -> Table:
    across = next((name for name in _ACROSS if name in rows[0]), "")
    columns = list(dict.fromkeys(row.get(across, "") for row in rows))
    title = f"{title}; across: {across}" if across else title
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=16)
    for column in columns:
        table.add_column(str(column), justify="right", no_wrap=True)
    row_by_cell = {(_name(row), row.get(across, "")): row for row in rows}
    for method in dict.fromkeys(_name(row) for row in rows):
        table.add_row(method, *(_cell(row_by_cell.get((method, column))) for column in columns))
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


def _repair_tables(results: Results) -> list[Table]:
    """Scores by number of needles and first stage, and gains at one K (RepairKV, Table 1)."""
    rows = [
        row
        for row in results.results
        if "mean" in row and not any(name in row for name in _REPAIR_DETAILS)
    ]
    scores = [row for row in rows if "against" not in row]
    gains = [row for row in rows if "against" in row]
    tables = []
    for name, own in _groups(scores).items():
        tables.append(_scores_table(f"{results.suite} {name}, first stage {own[0]['method']}", own))
        against = [row for row in gains if _group_name(row) == name]
        tables += [_gains_table(name, own, against)] if against and "active_rows" in own[0] else []
    return tables


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_group_name(row), []).append(row)
    return groups


def _group_name(row: Row) -> str:
    needles = f"{row['needles']}q " if "needles" in row else ""
    facts = f"{row['facts']} facts, " if "facts" in row else ""
    signal = f"{row['signal']}, " if "signal" in row else ""
    return f"{facts}{signal}{needles}{row['method']}"


def _scores_table(title: str, rows: Sequence[Row]) -> Table:
    """Scores by condition (lines) and by K, turn or share of evicted tokens scored (columns).

    Rows without such a value are in the column "any".
    """
    across = next(
        (name for name in ("stopped_at", "turn") if any(name in row for row in rows)), "k"
    )
    table = Table(
        title=f"{title}; across: {_REPAIR_COLUMNS[across]}",
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
    every = across != "k" and any(_column(row, across) is None for row in rows)
    if every:
        table.add_column("any", justify="right", no_wrap=True)
    for name in dict.fromkeys(_condition(row) for row in rows):
        own = {_column(row, across): row for row in rows if _condition(row) == name}
        # The full cache and the base are the same at every K.
        cells = [
            _mean_cell(own.get(column, own.get(None) if across == "k" else None))
            for column in columns
        ]
        table.add_row(name, *cells, *([_mean_cell(own.get(None))] if every else []))
    return table


def _column(row: Row, across: str) -> object:
    """The value of a row's column; None for a row that is equal in all columns."""
    return (row["k"] or None) if across == "k" else row.get(across)


def _condition(row: Row) -> str:
    return str(row.get("of", row["condition"]))


def _gains_table(name: str, scores: Sequence[Row], gains: Sequence[Row]) -> Table:
    """Scores, and gains with their intervals, at the K nearest to the paper's 48."""
    k = min({row["k"] for row in gains}, key=lambda one: (abs(one - _GAIN_K), one))
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
    gain_by_condition = {row["of"]: row for row in gains if row["k"] == k}
    for row in scores:
        if row["k"] not in (0, k) or "turn" in row:
            continue
        gain = gain_by_condition.get(row["of"])
        text = (
            f"{gain['mean']:+.3f} [{gain['ci_low']:+.3f}, {gain['ci_high']:+.3f}]" if gain else ""
        )
        table.add_row(row["of"], f"{row['mean']:.3f}", text, f"{row['active_rows']:,.0f}")
    return table


def _mean_cell(row: Row | None) -> str:
    """The mean alone: a terminal has no room for the intervals of so many columns."""
    return "" if row is None else f"{row['mean']:.2f}"
