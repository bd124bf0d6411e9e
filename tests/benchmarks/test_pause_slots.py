"""The simulation of slots in pauses: what is known by arithmetic holds for every policy."""

import json
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from benchmarks.benchmark import BadOptions
from benchmarks.pause_slots.benchmark import Plan, measure, simulate
from benchmarks.pause_slots.policies import FORESEEN, LEAST_RECENTLY_USED, Policy, learn
from benchmarks.pause_slots.recordings import Step, read_runs
from benchmarks.pause_slots.simulation import Simulation

POLICIES = (LEAST_RECENTLY_USED, FORESEEN)


def play(policy: Policy, slots: int, swap: float, *sessions: list[Step]) -> list[float]:
    return Simulation(policy, slots, swap).run([iter(steps) for steps in sessions])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: each.name)
def test_nobody_waits_behind_a_pause_where_every_session_has_a_slot(policy: Policy) -> None:
    waits = play(policy, 3, 0.5, *[[Step(2.0, 1.0, "ls")] * 4] * 3)
    assert waits == pytest.approx([0.5] * 3 + [0.0] * 12), "a first turn swaps in"


def test_a_paused_session_gives_its_slot_and_swaps_in_again_when_its_result_comes() -> None:
    one, other = [Step(1.0, 5.0, "make")], [Step(2.0, 9.0, "make")]
    waits = play(LEAST_RECENTLY_USED, 1, 0.5, one, other)
    # The first begins at 0.5 and pauses at 1.5: the second, which came at 0.1, begins at 2.0 and pauses at
    # 4.0. The first's result is there at 6.5, the second's at 13.
    assert waits == pytest.approx([0.5, 1.9, 0.5, 0.5])


def test_a_session_whose_pause_is_foreseen_is_there_when_its_result_comes() -> None:
    one, other = [Step(1.0, 5.0, "make")], [Step(2.0, 9.0, "make")]
    assert play(FORESEEN, 1, 0.5, one, other) == pytest.approx([0.5, 1.9, 0.0, 0.0])


def test_a_slot_is_given_of_the_session_that_returns_last_where_that_is_known() -> None:
    # When the first comes back at 5, the second has paused for longer than the third, and returns sooner.
    sessions = (
        [Step(1.0, 4.0, "ls")],
        [Step(1.2, 4.5, "ls")],
        [Step(0.5, 1.0, "ls"), Step(1.0, 60.0, "make")],
    )
    known = play(FORESEEN, 2, 0.1, *sessions)
    unknown = play(LEAST_RECENTLY_USED, 2, 0.1, *sessions)
    assert len(known) == len(unknown) == 7
    assert sum(known) < sum(unknown) - 0.1, "the second need not be swapped in again"


def test_pauses_are_predicted_by_the_median_of_their_tool() -> None:
    known = learn([(Step(1.0, 4.0, "ls"), Step(1.2, 50.0, "make")), (Step(1.0, 6.0, "ls"),)])
    assert known.predict is not None
    assert known.predict(Step(1.0, 0.0, "ls")) == 5.0
    assert known.predict(Step(1.0, 0.0, "make")) == 50.0
    assert known.predict(Step(1.0, 0.0, "unknown")) == 6.0, "the median of all"


def test_recordings_of_both_agents_are_read(tmp_path: Path) -> None:
    events = [
        {"id": 0, "timestamp": "2025-01-01T00:00:00", "source": "user", "action": "message"},
        {"id": 1, "timestamp": "2025-01-01T00:00:01", "observation": "recall", "cause": 0},
        {"id": 2, "timestamp": "2025-01-01T00:00:04", "source": "agent", "action": "run"},
        {"id": 3, "timestamp": "2025-01-01T00:00:06", "observation": "run", "cause": 2},
    ]
    openhands, swe_agent = tmp_path / "runs.jsonl", tmp_path / "run.traj"
    openhands.write_text(json.dumps({"history": events}))
    steps = [{"action": "ls -l", "execution_time": 0.5}, {"action": "submit"}]
    swe_agent.write_text(json.dumps({"trajectory": steps}))
    assert read_runs([swe_agent, openhands]) == [(Step(3.0, 2.0, "run"),), (Step(3.0, 0.5, "ls"),)]
    plan = Plan(recordings=(str(openhands), str(swe_agent)), steps=30)
    rows = list(measure(plan).rows)
    assert len(rows) == 3 * len(plan.ratios) * len(plan.swaps) * len(plan.stretches)
    assert [row["n"] for row in rows[:3]] == [rows[0]["n"]] * 3, (
        "the policies play the same sessions"
    )
    with pytest.raises(BadOptions, match="at least two recorded runs"):
        measure(Plan(recordings=(str(openhands),)))


def test_results_follow_from_the_seed() -> None:
    runs = [tuple(repeat(Step(1.0, 0.5, name), 40)) for name in ("ls", "make")]

    def simulated(seed: int) -> Iterator[object]:
        return iter(simulate(runs, Plan(seed=seed, steps=50, ratios=(2.0,))))

    assert list(simulated(1)) == list(simulated(1))
