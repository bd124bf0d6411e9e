"""`kvrecall report`: result files as tables in the terminal and an HTML page with plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrecall_server.reporting.html import Page
from kvrecall_server.reporting.results import Results, Row, read_results

QUALITY = (
    "condition",
    "method",
    "k",
    "budget",
    "share",
    "active_rows",
    "mean",
    "ci_low",
    "ci_high",
    "n",
)
SPEED = ("condition", "metric", "unit", "median", "p95", "n", "ratio_to", "ratio")


def report_command(
    files: Annotated[
        list[Path], typer.Argument(help="Result files of demo, replay, eval or a benchmark.")
    ],
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("kvrecall-report.html"),
) -> None:
    """Show result files: tables here, plots in an HTML page."""
    console = Console()
    page = Page("kvrecall: measurements")
    for path in files:
        results = read_results(path)
        _print_tables(console, results)
        _add_to_page(page, results)
    page.write(out)
    console.print(f"plots: {out}", highlight=False, soft_wrap=True)


def quality_rows(results: Results) -> list[Row]:
    """Rows with a mean and its interval."""
    return [row for row in results.results if "mean" in row]


def speed_rows(results: Results) -> list[Row]:
    """Rows with a metric and its median."""
    return [row for row in results.results if "metric" in row and "median" in row]


def _print_tables(console: Console, results: Results) -> None:
    console.print(
        f"[bold]{results.suite}[/]  {results.model}, seed {results.seed}", highlight=False
    )
    console.print(results.command, style="dim", highlight=False, soft_wrap=True, markup=False)
    for columns, rows in ((QUALITY, quality_rows(results)), (SPEED, speed_rows(results))):
        if rows:
            head, lines = build_table(columns, rows)
            table = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
            for line in lines:
                table.add_row(*line)
            console.print(table)


def _add_to_page(page: Page, results: Results) -> None:
    # matplotlib takes a second to import: the other commands do without.
    from evals.reporting.eval_plots import build_figure
    from kvrecall_server.reporting.figures import svg
    from kvrecall_server.reporting.report_plots import divergence_plot, quality_plot, speed_plot

    page.heading(f"{results.suite}: {results.model}")
    page.code(results.command)
    page.paragraph(", ".join(f"{name}: {value}" for name, value in results.machine.items()), "note")
    if quality := quality_rows(results):
        figure = build_figure(results)
        page.plot(svg(figure) if figure else quality_plot(quality), "means with 95% intervals")
        page.table(*build_table(QUALITY, quality))
    compared = [row for row in results.results if row.get("kl_mean") is not None]
    if compared:
        page.plot(divergence_plot(compared), "divergence from the full cache over the conversation")
    speed = speed_rows(results)
    for metric in dict.fromkeys((row["metric"], row["unit"]) for row in speed):
        rows = [row for row in speed if (row["metric"], row["unit"]) == metric]
        page.plot(speed_plot(rows), f"{metric[0]} in {metric[1]}")
    if speed:
        page.table(*build_table(SPEED, speed))


def build_table(columns: Sequence[str], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table with those of `columns` that at least one row has."""
    head = [name for name in columns if any(name in row for row in rows)]
    return head, [[_text(row.get(name)) for name in head] for row in rows]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
