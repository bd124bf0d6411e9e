"""Report of a run: a table for the terminal, and rows for the result file."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.faults.rounds import AFTER_REBUILD, DIFFERENT, Findings
from kvrecall.reporting.results import Row

# Kinds of failures; each count is to stay at 0.
WRONG = (
    "turns lost or twice",
    DIFFERENT,
    AFTER_REBUILD,
    "answers that changed",
    "torn streams",
    "not served",
    "did not start",
    "held without a session",
    "pages and files left",
    "fsck",
    "bad exits",
    "stray processes",
)
# Texts printed for each kind of failure.
SHOWN = 5


def build_rows(findings: Sequence[Findings]) -> list[Row]:
    """Counts over all rounds, as rows of a result file."""
    faults = _sum(found.faults for found in findings)
    rows = [_row("faults", kind, number) for kind, number in sorted(faults.items())]
    rows.append(_row("faults", "all", faults.total()))
    rows += _client_rows(findings)
    rows += [
        _row("service", name, number) for name, number in sorted(_count_events(findings).items())
    ]
    rows.append(
        _row(
            "service",
            "starts refused, tried again",
            sum(found.refused_starts for found in findings),
        )
    )
    rows.append(
        _row("service", "lost pages computed again", sum(found.rebuilt_pages for found in findings))
    )
    rows.append(
        _row(
            "differences",
            "answers alike, other rows held",
            sum(len(found.other_rows) for found in findings),
        )
    )
    rows += [_row("wrong", name, len(_failures(findings, name))) for name in WRONG]
    return rows


def print_report(findings: Sequence[Findings], console: Console) -> None:
    """Print the counts, and the first texts of each kind of failure."""
    table = Table("", "", "count", title="faults under load")
    for row in build_rows(findings):
        table.add_row(str(row["condition"]), str(row["metric"]), str(row["n"]))
    console.print(table)
    for name in WRONG:
        for text in _failures(findings, name)[:SHOWN]:
            console.print(f"{name}: {text}", style="red", soft_wrap=True, markup=False)


def is_clean(findings: Sequence[Findings]) -> bool:
    """True if there was no failure of any kind."""
    return not any(_failures(findings, name) for name in WRONG)


def _client_rows(findings: Sequence[Findings]) -> list[Row]:
    acknowledged = _sum(found.counters.acknowledged for found in findings)
    retries = _sum(found.counters.retries for found in findings)
    unclear = _sum(found.counters.unclear for found in findings)
    return [
        *(_row("acknowledged", kind, number) for kind, number in sorted(acknowledged.items())),
        _row(
            "acknowledged",
            "turns not yet durable",
            sum(found.counters.not_durable for found in findings),
        ),
        *(_row("tried again after", code, number) for code, number in sorted(retries.items())),
        *(_row("tried again after 500", text, number) for text, number in sorted(unclear.items())),
    ]


def _count_events(findings: Sequence[Findings]) -> Counter[str]:
    return _sum(found.events for found in findings)


def _failures(findings: Sequence[Findings], name: str) -> list[str]:
    return [text for found in findings for text in found.failures.get(name, [])]


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _row(condition: str, metric: str, number: int) -> Row:
    return {"condition": condition, "metric": metric, "unit": "count", "n": number}
