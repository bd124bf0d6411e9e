"""Runs a suite's units in processes of their own, and notes what each found."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from evals.errors import EvalError, UnitFailed
from evals.journal import Journal, key_of
from evals.suite import Record, Suite, U, Unit

PROCESSES = 2
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run(
    suite: Suite[U], journal: Path, console: Console, processes: int = PROCESSES
) -> list[Record]:
    """All records of a suite, in the units' order whichever process ran them.

    A unit that the journal has is not run again. Every process computes on one thread and starts from nothing, so
    that numbers depend neither on how many there are nor on what ran before. Raises UnitFailed, BadJournal.
    """
    keys = [key_of(suite.name, unit) for unit in suite.units]
    with closing(Journal(journal)) as kept:
        missing = [at for at, key in enumerate(keys) if kept.records(key) is None]
        with _progress(console) as progress:
            task = progress.add_task(
                suite.name, total=len(keys), completed=len(keys) - len(missing)
            )
            for at, records in _computed(suite, missing, processes):
                kept.note(keys[at], suite.units[at], records)
                progress.update(task, advance=1, description=suite.units[at].label)
            progress.update(task, description=suite.name)
        return [record for key in keys for record in kept.records(key) or ()]


def _computed(
    suite: Suite[U], places: Sequence[int], processes: int
) -> Iterator[tuple[int, Sequence[Record]]]:
    """Run the units at these places; yields each place with its records, as they come. Raises UnitFailed."""
    if not places:
        return
    context = multiprocessing.get_context("spawn")
    alive, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(processes, len(places)), context, _begin, (alive,))
    try:
        waiting = {pool.submit(suite.run, suite.units[at]): at for at in places}
        for done in as_completed(waiting):
            yield waiting[done], _records(done, suite.units[waiting[done]])
        pool.shutdown()
    finally:
        lifeline.close()
        pool.shutdown(cancel_futures=True)


def _records(done: "Future[Sequence[Record]]", unit: Unit) -> Sequence[Record]:
    try:
        return done.result()
    except EvalError:
        raise
    except BrokenProcessPool as error:
        raise UnitFailed(
            f"{unit.label}: its process was killed, perhaps for memory; try --processes 1"
        ) from error
    except Exception as error:  # whatever broke in there: which unit it was must be said here
        raise UnitFailed(f"{unit.label}: {type(error).__name__}: {error}") from error


def _begin(alive: Connection) -> None:
    """In a new process, before torch is imported: one thread, and an end when the runner ends, however it does."""
    os.environ.update(
        dict.fromkeys(_THREADS, "1"), TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner is interrupted as well, and ends this
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    alive.poll(None)  # nothing is ever sent: it returns when the other end is closed
    os._exit(1)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<36.36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
