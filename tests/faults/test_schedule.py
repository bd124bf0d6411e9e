"""Scripts and schedules of faults are functions of their seeds."""

from itertools import islice

import pytest

from benchmarks.faults.faults import CLUSTER, EMBEDDED, KINDS, schedule
from benchmarks.faults.load.scripts import scripts


@pytest.mark.parametrize("weights", [EMBEDDED, CLUSTER])
def test_a_schedule_is_a_function_of_its_seed(weights: dict[str, float]) -> None:
    assert set(weights) <= set(KINDS)
    one, again, other = (list(islice(schedule(weights, seed), 200)) for seed in ("1", "1", "2"))
    assert one == again != other
    assert {fault.kind for fault in one} == set(weights), "every kind occurs"
    assert len({fault.seed for fault in one}) == len(one)


def test_scripts_are_a_function_of_their_seed() -> None:
    assert scripts(1, 8) == scripts(1, 8) != scripts(2, 8)
    kinds = {step.kind for script in scripts(1, 8) for step in script.steps}
    assert kinds == {"create", "turn", "event", "fork"}


def test_a_script_writes_to_a_session_only_after_it_was_created() -> None:
    for script in scripts(3, 20):
        created = set()
        for step in script.steps:
            assert step.kind == "create" or step.session in created
            created.add(step.body["as"] if step.kind == "fork" else step.session)
