"""Progress of what takes seconds: bars on a terminal, elsewhere a line every few seconds."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_SECONDS = 5.0
"""Time between two lines where standard error is no terminal."""

Report = Callable[[int, int], None]
"""Takes what is done, and all that there is to do."""

_log = structlog.get_logger("kvrecall.process")


@contextmanager
def show_progress(what: str) -> Iterator[Report]:
    """Say at once on standard error what is being done, and how far it is until the block ends.

    On a terminal the bars of libraries that load and download are shown below.
    """
    console = Console(stderr=True)
    with _show_bars(what, console) if console.is_terminal else _log_lines(what) as report:
        yield report


@contextmanager
def _show_bars(what: str, console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bars = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    task = bars.add_task(what, total=None)
    with bars, _library_bars(bars):
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def _log_lines(what: str) -> Iterator[Report]:
    """Log a line at the beginning, and one every `LINE_SECONDS` with the time and the counts."""
    counts = dict[str, int]()
    started = time.monotonic()
    ended = threading.Event()

    def report(done: int, total: int) -> None:
        counts.update(done=done, total=total)

    def log() -> None:
        while not ended.wait(LINE_SECONDS):
            _log.info(what, seconds=round(time.monotonic() - started), **counts)

    _log.info(what)
    thread = threading.Thread(target=log, name="progress", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        ended.set()
        thread.join()


@contextmanager
def _library_bars(bars: Progress) -> Iterator[None]:
    """Show the progress of libraries, which all report it to tqdm, as bars of `bars`."""
    try:
        from tqdm import auto, std
    except ModuleNotFoundError:  # a gateway's installation
        yield
        return

    def begin(bar: Any, *arguments: Any, **options: Any) -> None:
        std.tqdm.__init__(bar, *arguments, **{**options, "gui": True})  # draws nothing by itself
        if not bar.disable:
            bar.task = bars.add_task(f"  {bar.desc.strip(': .')}", total=bar.total)

    def display(bar: Any, *_: Any, **__: Any) -> None:
        bars.update(bar.task, completed=bar.n, total=bar.total)

    def close(bar: Any) -> None:
        if not bar.disable:
            bar.disable = True
            bars.remove_task(bar.task)

    # Those that are made after the block are drawn nowhere.
    methods = {
        "__init__": begin,
        "display": display,
        "close": close,
        "clear": lambda *_, **__: None,
    }
    auto.tqdm = type("Bar", (std.tqdm,), methods)
    yield
