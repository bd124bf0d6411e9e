"""Everything that happens follows from the seed: what is said, and which faults come when."""

from itertools import islice

import pytest

from benchmarks.faults.faults import CLUSTER, EMBEDDED, KINDS, schedule
from benchmarks.faults.scripts import scripts


@pytest.mark.parametrize("weights", [EMBEDDED, CLUSTER])
def test_a_schedule_follows_from_its_seed(weights: dict[str, float]) -> None:
    assert set(weights) <= set(KINDS)
    one, again, other = (list(islice(schedule(weights, seed), 200)) for seed in ("1", "1", "2"))
    assert one == again != other
    assert {fault.kind for fault in one} == set(weights), "every kind happens"
    assert len({fault.seed for fault in one}) == len(one)


def test_scripts_follow_from_their_seed() -> None:
    assert scripts(1, 8) == scripts(1, 8) != scripts(2, 8)
    kinds = {step.kind for script in scripts(1, 8) for step in script.steps}
    assert kinds == {"create", "turn", "event", "fork"}


def test_a_script_speaks_to_a_session_only_once_it_is_there() -> None:
    for script in scripts(3, 20):
        there = set()
        for step in script.steps:
            assert step.kind == "create" or step.who in there
            there.add(step.body["as"] if step.kind == "fork" else step.who)
