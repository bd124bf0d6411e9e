"""Scripts and schedules of faults are functions of their seeds."""

from itertools import islice

import pytest

from faults.kinds.schedule import (
    CLUSTER,
    EMBEDDED,
    FILES_ONLY,
    KINDS,
    POWER,
    STALE_WRITERS,
    schedule,
)
from faults.load.scripts import scripts
from faults.load.talks import APIS, talk_scripts


@pytest.mark.parametrize("weights", [EMBEDDED, CLUSTER, FILES_ONLY, POWER, STALE_WRITERS])
def test_a_schedule_is_a_function_of_its_seed(weights: dict[str, float]) -> None:
    assert set(weights) <= set(KINDS)
    one, again, other = (list(islice(schedule(weights, seed), 400)) for seed in ("1", "1", "2"))
    assert one == again != other
    assert {fault.kind for fault in one} == set(weights), "every kind occurs"
    assert len({fault.seed for fault in one}) == len(one)


def test_every_kind_happens_in_some_set_up() -> None:
    assert set(KINDS) == {*EMBEDDED, *CLUSTER, *FILES_ONLY, *POWER, *STALE_WRITERS}


def test_scripts_are_a_function_of_their_seed() -> None:
    assert scripts(1, 8) == scripts(1, 8) != scripts(2, 8)
    kinds = {step.kind for script in scripts(1, 8) for step in script.steps}
    assert kinds == {"create", "turn", "event", "fork", "abort", "move"}


def test_one_in_eight_scripts_has_episodes() -> None:
    created = [script.steps[0].body for script in scripts(1, 16)]
    found = ["episodes" in body.get("research", {}) for body in created]
    assert found == [each.episodes for each in scripts(1, 16)]
    assert sum(found) == 2


def test_talks_are_a_function_of_their_seed_and_go_through_every_api() -> None:
    assert talk_scripts(1, 9) == talk_scripts(1, 9) != talk_scripts(2, 9)
    assert [each.api for each in talk_scripts(1, 3)] == list(APIS)
    for talk in talk_scripts(3, 30):
        assert 0 < talk.sleeps_at < len(talk.says)
        for number, say in enumerate(talk.says):
            assert 0 <= say.back <= number
            if talk.api == "conversation":
                assert say.keyed
                assert not say.back, "what was said to a conversation stays"


def test_a_script_writes_to_a_session_only_after_it_was_created() -> None:
    for script in scripts(3, 20):
        created = set()
        for step in script.steps:
            assert step.kind == "create" or step.session in created
            created.add(step.body["as"] if step.kind == "fork" else step.session)


def test_every_session_of_a_script_is_asked_anew_after_its_sleep() -> None:
    for script in scripts(3, 20):
        sessions = {step.session for step in script.steps[: script.sleeps_at]}
        assert {step.session for step in script.steps[script.sleeps_at :]} == sessions
