"""Runs a suite's units in processes of their own and journals the records of each."""

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
from evals.journal import Journal, unit_key
from evals.suite import Record, Suite, U, Unit

PROCESSES = 2
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run(
    suite: Suite[U], journal: Path, console: Console, processes: int = PROCESSES
) -> list[Record]:
    """All records of a suite, in the units' order whichever process ran them.

    A unit that is in the journal is not run again. Every process computes on one thread and starts
    without state, so that numbers depend neither on the number of processes nor on earlier units.
    Raises UnitFailed, BadJournal.
    """
    keys = [unit_key(suite.name, unit) for unit in suite.units]
    with closing(Journal(journal)) as kept:
        missing = [index for index, key in enumerate(keys) if kept.records(key) is None]
        with _progress(console) as progress:
            task = progress.add_task(
                suite.name, total=len(keys), completed=len(keys) - len(missing)
            )
            for index, records in _run_units(suite, missing, processes):
                kept.append(keys[index], suite.units[index], records)
                progress.update(task, advance=1, description=suite.units[index].label)
            progress.update(task, description=suite.name)
        return [record for key in keys for record in kept.records(key) or ()]


def _run_units(
    suite: Suite[U], indices: Sequence[int], processes: int
) -> Iterator[tuple[int, Sequence[Record]]]:
    """Run the units at these indices; yields each index with its records, as units finish.

    Raises UnitFailed.
    """
    if not indices:
        return
    context = multiprocessing.get_context("spawn")
    alive, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(processes, len(indices)), context, _start_process, (alive,))
    try:
        waiting = {pool.submit(suite.run, suite.units[index]): index for index in indices}
        for done in as_completed(waiting):
            yield waiting[done], _get_records(done, suite.units[waiting[done]])
        pool.shutdown()
    finally:
        lifeline.close()
        pool.shutdown(cancel_futures=True)


def _get_records(done: "Future[Sequence[Record]]", unit: Unit) -> Sequence[Record]:
    try:
        return done.result()
    except EvalError:
        raise
    except BrokenProcessPool as error:
        raise UnitFailed(
            f"{unit.label}: its process was killed, perhaps for memory; try --processes 1"
        ) from error
    except Exception as error:  # any error of a unit: the message names the unit
        raise UnitFailed(f"{unit.label}: {type(error).__name__}: {error}") from error


def _start_process(alive: Connection) -> None:
    """Initialize a new process before torch is imported: one thread, and exit with the runner."""
    os.environ.update(
        dict.fromkeys(_THREAD_VARIABLES, "1"), TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner is interrupted as well, and ends this
    threading.Thread(target=_exit_when_closed, args=(alive,), daemon=True).start()


def _exit_when_closed(alive: Connection) -> None:
    """Exit when the other end of the pipe is closed, for whatever reason the runner ended."""
    alive.poll(None)  # no data is ever sent: it returns when the other end is closed
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
