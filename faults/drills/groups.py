"""Drills on groups of Redis servers under load: a failover, and slots that move."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from faults.drills.base import Stage
from faults.load.contest import Contest
from faults.rig.redis_groups import Sentinels, Shards
from faults.rig.redis_process import running
from faults.rig.setups import Setup, cluster
from faults.wake import ask_contested

MOVED = 0.3


def fail_over(stage: Stage) -> None:
    """The primary behind sentinels is killed under load, and comes back as a replica."""
    group = Sentinels(stage.folder / "group")
    with _on(stage, group) as setup:
        _under_load(stage, setup, group.fail_over)


def move_slots(stage: Stage) -> None:
    """A third of a node's slots move to another node under load."""
    group = Shards(stage.folder / "group")
    with _on(stage, group) as setup:
        _under_load(stage, setup, lambda: group.move_slots(0, 1, MOVED))


@contextmanager
def _on(stage: Stage, group: Sentinels | Shards) -> Iterator[Setup]:
    """Two workers and two gateways on a group of servers."""
    with running(group):
        yield cluster(stage.folder, stage.rig, url=group.url)


def _under_load(stage: Stage, setup: Setup, fault: Callable[[], None]) -> None:
    with stage.started(setup) as client:
        contest = Contest(f"drill-{stage.folder.name}", stage.counters)
        over = threading.Event()
        load = threading.Thread(target=contest.run, args=(setup.urls, over))
        load.start()
        try:
            over.wait(stage.rng.uniform(1.0, 4.0))
            fault()
            over.wait(stage.rng.uniform(2.0, 6.0))
        finally:
            over.set()
            load.join()
        ask_contested(setup, client, contest, stage.calm, stage.findings)
