"""The demo's table, in the terminal."""

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from kvrecall.cli.demo.summary import ArmSummary
from kvrecall.cli.results import Estimate
from kvrecall.cli.text import readable_bytes

Cell = Callable[[ArmSummary], str]


def measures() -> list[tuple[str, Cell]]:
    """The table's lines: what is measured, and how an arm's value is written."""
    return [
        ("exact answers", lambda arm: estimate_text(arm.exact["all"])),
        ("  plain questions", lambda arm: estimate_text(arm.exact["plain"])),
        ("  after a tool", lambda arm: estimate_text(arm.exact["after a tool"])),
        ("peak active rows", lambda arm: f"{arm.peak_rows:,}"),
        ("peak active bytes", lambda arm: readable_bytes(arm.peak_bytes)),
        ("seconds, answer", lambda arm: f"{arm.answer_seconds:.3f}"),
        ("to first token", lambda arm: f"{arm.first_token_seconds:.3f}"),
        ("tool pauses", lambda arm: f"{arm.pauses}"),
        ("repairs", lambda arm: f"{arm.repairs}"),
        ("rows promoted", lambda arm: f"{arm.promoted:,}"),
    ]


def arms_table(summaries: Sequence[ArmSummary], title: str) -> Table:
    """One column per arm, one line per measure."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.caption = "exact answers: share [95% bootstrap interval], n questions; seconds: medians"
    table.add_column("", no_wrap=True)
    for summary in summaries:
        table.add_column(summary.arm.name, justify="right", width=12)
    for name, cell in measures():
        table.add_row(name, *(cell(summary) for summary in summaries))
    return table


def estimate_text(estimate: Estimate | None) -> str:
    """A share with its interval and count, on two lines."""
    if estimate is None:
        return "none asked"
    return f"{estimate.mean:.2f} (n={estimate.n})\n[{estimate.low:.2f}, {estimate.high:.2f}]"
