"""A few faults to each set-up, in CI. `make faults` lets hundreds happen."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.faults.faults import CLUSTER, EMBEDDED
from benchmarks.faults.rounds import Round, folder_of
from benchmarks.faults.scripts import Script
from benchmarks.faults.setups import Setup, cluster, embedded
from benchmarks.faults.speaking import Told

FAULTS = 5
# With these seeds the first five faults are of five kinds: among others a kill -9 of a worker and of Redis, an owner
# that is stopped until its sessions have moved on, a full disk, and bits that flip in files, in headers and in Redis.
SETUPS = [(embedded, EMBEDDED, "64"), (cluster, CLUSTER, "5046")]


@pytest.mark.parametrize(("build", "weights", "seed"), SETUPS, ids=["embedded", "cluster"])
def test_what_was_acknowledged_is_there_and_nothing_is_left_over(
    build: Callable[[Path, Path], Setup],
    weights: Mapping[str, float],
    seed: str,
    root: Path,
    model: Path,
    told: Sequence[Script],
    calm: Mapping[int, Told],
) -> None:
    setup = build(folder_of(root, build.__name__), model)
    found = Round(setup, told, calm, seed).run(weights, FAULTS)
    assert found.faults.total() == FAULTS
    assert found.tally.acknowledged["turn"] > 0
    assert {what: wrong for what, wrong in found.wrong.items() if wrong} == {}
