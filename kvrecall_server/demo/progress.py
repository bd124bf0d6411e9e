"""Progress of the demo's runs: bars on a terminal, elsewhere a line for each quarter of a run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

QUARTERS = 4

Advance = Callable[[int], None]
"""Takes the number of steps that are done since it was called last."""
Begin = Callable[[str, int], Advance]
"""Takes the name of a run that begins, and its number of steps."""


@contextmanager
def show_runs(console: Console) -> Iterator[Begin]:
    """Show how far each run is that is begun in the block."""
    if not console.is_terminal:
        yield lambda name, total: _print_lines(console, name, total)
        return
    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:

        def begin(name: str, total: int) -> Advance:
            task = bars.add_task(name, total=total)
            return lambda count: bars.advance(task, count)

        yield begin


def _print_lines(console: Console, name: str, total: int) -> Advance:
    """Print that a run begins, and later each quarter that it has passed."""
    started = time.monotonic()
    done = passed = 0

    def advance(count: int) -> None:
        nonlocal done, passed
        done += count
        quarter = QUARTERS * done // total
        if quarter > passed:
            passed = quarter
            seconds = time.monotonic() - started
            line = f"{name}: {done} of {total}, {seconds:.0f} s"
            console.print(line, highlight=False, soft_wrap=True)

    console.print(f"{name}: begins", highlight=False, soft_wrap=True)
    return advance
