"""Workers of two ranks in place of those of one process: rank 0 is the test's own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from faults.rig.ports import free_port
from kvstore.store import RowStore
from reference import MODEL_PATH
from tests.workers.conftest import LocalWorker
from tests.workers.parallel.follower_plan import PATIENCE, Plan
from tests.workers.parallel.launched import ROOT
from workers.parallel.process_group import ProcessGroup


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    """The group of this process and one that follows it."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    quiet = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("follow.py")
    second = subprocess.Popen(
        [sys.executable, str(program)], cwd=ROOT, env=os.environ | quiet | ranks[1]
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ranks[0].items():
            patch.setenv(name, value)
        joined = ProcessGroup.join("cpu", PATIENCE)
        try:
            yield joined
        finally:
            second.kill()
            second.wait()
            joined.leave()


@pytest.fixture
def lose_page() -> Callable[[RowStore, str, int], None]:
    """lose_page(store, session, index): as everywhere, of rank 0 alone."""

    def lose(store: RowStore, session: str, index: int) -> None:
        [page] = store.page_ids(session, [index])
        assert page is not None, "only a stored page can be lost"
        store.flush(session)
        for tier in store._stack.tiers.warm:
            tier.delete([page])

    return lose


@pytest.fixture
def make_worker(
    group: ProcessGroup, model_path: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[..., LocalWorker]]:
    """make_worker(family, directory, ram_pages, ..., window, **settings): as everywhere, on two ranks.

    One at a time: a new one closes the one before.
    """
    made: list[LocalWorker] = []
    numbers = count()

    def make(
        family: str = "llama",
        directory: str | None = None,
        ram_pages: int = 1024,
        window: int | None = None,
        layer_sensitivity: tuple[float, ...] | None = None,
        **settings: Any,
    ) -> LocalWorker:
        while made:
            made.pop().close()
        data = tmp_path / (directory or f"rows-{next(numbers)}")
        plan = Plan(
            model_path(family), MODEL_PATH, data, ram_pages, window, layer_sensitivity, settings
        )
        group.lead(plan)
        made.append(LocalWorker(plan.build(group)))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
