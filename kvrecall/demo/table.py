"""The demo's table, in the terminal."""

from collections.abc import Callable, Sequence
from functools import partial

from rich import box
from rich.table import Table

from kvrecall.demo.arms import AFTER_TOOL, PLAIN
from kvrecall.demo.summary import ArmSummary
from kvrecall.reporting.units import readable_bytes

Cell = Callable[[ArmSummary], str]


def measures(summaries: Sequence[ArmSummary]) -> list[tuple[str, Cell]]:
    """The table's lines: what is measured, and how an arm's value is written."""
    lines: list[tuple[str, Cell]] = [
        (f"{label}, n={_asked(summaries, kind)}", partial(_exact, kind))
        for label, kind in (
            ("exact answers", "all"),
            ("  plain", PLAIN),
            ("  after a tool", AFTER_TOOL),
        )
    ]
    return [
        *lines,
        ("peak active rows", lambda arm: f"{arm.peak_rows:,}"),
        ("peak active bytes", lambda arm: readable_bytes(arm.peak_bytes)),
        ("seconds per answer", lambda arm: f"{arm.answer_seconds:.3f}"),
        ("  to first token", lambda arm: f"{arm.first_token_seconds:.3f}"),
        ("tool pauses", lambda arm: f"{arm.pauses}"),
        ("repairs", lambda arm: f"{arm.repairs}"),
        ("rows promoted", lambda arm: f"{arm.promoted:,}"),
    ]


def arms_table(summaries: Sequence[ArmSummary], title: str) -> Table:
    """One column per arm, one line per measure."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.caption = "exact answers: share of n, its 95% bootstrap interval; seconds: medians"
    table.add_column("", no_wrap=True)
    for summary in summaries:
        table.add_column(summary.arm.name, justify="right", width=12)
    for name, cell in measures(summaries):
        table.add_row(name, *(cell(summary) for summary in summaries))
    return table


def _exact(kind: str, summary: ArmSummary) -> str:
    """A share over its interval."""
    estimate = summary.exact[kind]
    return (
        "none asked"
        if estimate is None
        else f"{estimate.mean:.2f}\n{estimate.low:.2f}-{estimate.high:.2f}"
    )


def _asked(summaries: Sequence[ArmSummary], kind: str) -> int:
    """Questions of a kind: every arm was asked the same."""
    estimate = summaries[0].exact[kind]
    return 0 if estimate is None else estimate.n
