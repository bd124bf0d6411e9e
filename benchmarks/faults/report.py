"""What a run came to: a table to read, and rows for the result file."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.faults.rounds import AFTER_REBUILD, DIFFERENT, Findings
from kvrecall.reporting.results import Row

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
"""Every way in which a run can be wrong; each is to stay at 0."""
SHOWN = 5


def rows_of(findings: Sequence[Findings]) -> list[Row]:
    """The counts of all rounds together, as rows of a result file."""
    faults = _sum(found.faults for found in findings)
    rows = [_row("faults", kind, number) for kind, number in sorted(faults.items())]
    rows.append(_row("faults", "all", faults.total()))
    rows += _client_rows(findings)
    rows += [_row("service", name, number) for name, number in sorted(_logged(findings).items())]
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
    rows += [_row("wrong", name, len(_wrong(findings, name))) for name in WRONG]
    return rows


def say(findings: Sequence[Findings], console: Console) -> None:
    """Print the counts, and the first of whatever is wrong."""
    table = Table("", "", "count", title="faults under load")
    for row in rows_of(findings):
        table.add_row(str(row["condition"]), str(row["metric"]), str(row["n"]))
    console.print(table)
    for name in WRONG:
        for text in _wrong(findings, name)[:SHOWN]:
            console.print(f"{name}: {text}", style="red", soft_wrap=True, markup=False)


def is_clean(findings: Sequence[Findings]) -> bool:
    """Whether nothing at all was wrong."""
    return not any(_wrong(findings, name) for name in WRONG)


def _client_rows(findings: Sequence[Findings]) -> list[Row]:
    acknowledged = _sum(found.tally.acknowledged for found in findings)
    retries = _sum(found.tally.retries for found in findings)
    unclear = _sum(found.tally.unclear for found in findings)
    return [
        *(_row("acknowledged", kind, number) for kind, number in sorted(acknowledged.items())),
        _row(
            "acknowledged",
            "turns not yet durable",
            sum(found.tally.not_durable for found in findings),
        ),
        *(_row("tried again after", code, number) for code, number in sorted(retries.items())),
        *(_row("tried again after 500", text, number) for text, number in sorted(unclear.items())),
    ]


def _logged(findings: Sequence[Findings]) -> Counter[str]:
    return _sum(found.events for found in findings)


def _wrong(findings: Sequence[Findings], name: str) -> list[str]:
    return [text for found in findings for text in found.wrong.get(name, [])]


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _row(condition: str, metric: str, number: int) -> Row:
    return {"condition": condition, "metric": metric, "unit": "count", "n": number}
