"""A worker of two ranks under the suite: whichever of its processes ends, all of it does."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest

from faults.rig.processes import ServerProcess
from faults.rig.setups import Rig, Setup, files_only


@pytest.fixture(scope="module")
def setup(root: Path, rig: Rig) -> Iterator[Setup]:
    """A set-up of workers of two ranks, of which none runs."""
    folder = root / "ranks"
    folder.mkdir()
    setup = files_only(folder, replace(rig, ranks=2))
    yield setup
    setup.close()


@pytest.fixture
def worker(setup: Setup) -> Iterator[ServerProcess]:
    """One of its workers."""
    yield setup.workers[0]
    setup.workers[0].kill()


def seed_of(worker: ServerProcess, process: int) -> Random:
    """Find a seed with which this process is the one that is killed."""
    return next(Random(seed) for seed in count() if worker.choose_process(Random(seed)) == process)


@pytest.mark.parametrize("number", range(3), ids=["launcher", "rank 0", "rank 1"])
def test_when_one_process_is_killed_the_others_end(worker: ServerProcess, number: int) -> None:
    worker.start()
    processes = worker.processes
    assert len(processes) == 3
    worker.kill_one(seed_of(worker, processes[number]))
    assert not worker.processes


@pytest.mark.parametrize("seconds", [1.5, 3.0])
def test_ranks_whose_launcher_is_killed_while_they_load_end(
    worker: ServerProcess, seconds: float
) -> None:
    worker.start_and_kill(seconds)
    assert not worker.processes


def test_a_killed_worker_leaves_the_files_of_each_rank(setup: Setup, worker: ServerProcess) -> None:
    worker.start()
    worker.kill()
    assert not worker.processes
    assert [re.sub(r".*/worker-1/", "", str(folder)) for folder in setup.get_pages(worker)] == [
        "rank-0-of-2/pages",
        "rank-1-of-2/pages",
    ]
    assert all(folder.is_dir() for folder in setup.get_pages(worker))
