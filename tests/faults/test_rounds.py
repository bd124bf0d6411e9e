"""A few faults to each set-up, for CI; `make faults` injects hundreds."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.faults.load.client import Transcript
from benchmarks.faults.faults import CLUSTER, EMBEDDED
from benchmarks.faults.rounds import Round, create_folder
from benchmarks.faults.load.scripts import Script
from benchmarks.faults.rig.setups import Setup, cluster, embedded

FAULTS = 5
# With these seeds the first five faults are of five kinds: among others a kill -9 of a worker and
# of Redis, an owner that is stopped until its sessions have moved, a full disk, and flipped bits in
# files, in headers and in Redis.
SETUPS = [(embedded, EMBEDDED, "64"), (cluster, CLUSTER, "5046")]


@pytest.mark.parametrize(("build", "weights", "seed"), SETUPS, ids=["embedded", "cluster"])
def test_acknowledged_turns_survive_and_nothing_is_left_over(
    build: Callable[[Path, Path], Setup],
    weights: Mapping[str, float],
    seed: str,
    root: Path,
    model: Path,
    scripts: Sequence[Script],
    undisturbed: Mapping[int, Transcript],
) -> None:
    setup = build(create_folder(root, build.__name__), model)
    found = Round(setup, scripts, undisturbed, seed).run(weights, FAULTS)
    assert found.faults.total() == FAULTS
    assert found.counters.acknowledged["turn"] > 0
    assert {kind: texts for kind, texts in found.failures.items() if texts} == {}
