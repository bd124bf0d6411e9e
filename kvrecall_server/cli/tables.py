"""Tables of commands whose output other programs read as well: a row a line, never cut off."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their columns' names, aligned; numbers to the right."""
    widths = [max(map(len, each)) for each in zip(columns, *rows, strict=True)]
    console = Console()
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if _is_number(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        style = "bold" if row is columns else ""
        console.print(Text("  ".join(cells).rstrip(), style), soft_wrap=True)


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() and cell.replace(",", "").replace(".", "").isdigit()
