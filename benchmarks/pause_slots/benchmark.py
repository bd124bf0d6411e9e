"""Whose slot is given away in a tool's pause: simulated on recorded pauses, against least recently used.

`python -m benchmarks pause-slots --recordings FILE ...` plays recorded agent runs (OpenHands' `.jsonl`,
SWE-agent's `.traj`) in more sessions than there are slots. Three policies choose whose slot a session
gets that has none: the longest paused session's; by the median pause of each tool in the other half of
the runs; and with every pause foreseen, more than any prediction knows. The last two also swap a session
in ahead of its result. Seconds are those from a tool's result to the beginning of its turn.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from benchmarks.benchmark import BadOptions, Benchmark, Measured
from benchmarks.options import option
from benchmarks.pause_slots.policies import FORESEEN, LEAST_RECENTLY_USED, learn
from benchmarks.pause_slots.recordings import Run, Step, read_runs
from benchmarks.pause_slots.simulation import Simulation
from kvrecall_server.reporting.results import Row, speed_row

# Longest pause that is played: one of minutes would leave the slots to the others.
LONGEST_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """Sizes of a simulation."""

    recordings: tuple[str, ...] = option((), "files of recorded runs")
    seed: int = 7400
    slots: int = 8
    ratios: tuple[float, ...] = option((1.5, 2.0, 4.0), "sessions for each slot")
    swaps: tuple[float, ...] = option((0.02, 0.2, 1.0), "seconds of a swap-in")
    stretches: tuple[float, ...] = option((1.0, 10.0), "factors of the recorded pauses")
    steps: int = option(400, "turns of a session")


def measure(plan: Plan) -> Measured:
    """Simulate every policy. Raises BadOptions without two recorded runs."""
    runs = read_runs([Path(name) for name in plan.recordings])
    if len(runs) < 2:
        raise BadOptions("--recordings needs files with at least two recorded runs")
    return Measured("pause-slots.json", "none", simulate(runs, plan), plan.seed)


def simulate(runs: Sequence[Run], plan: Plan) -> Iterator[Row]:
    """Simulate each number of sessions, seconds of a swap-in and factor of the pauses."""
    for stretch in plan.stretches:
        played = [_stretch(run, stretch) for run in runs]
        for ratio in plan.ratios:
            for swap in plan.swaps:
                yield from compare(played[::2], played[1::2], plan, ratio, swap, stretch)


def compare(
    tuning: Sequence[Run],
    held_out: Sequence[Run],
    plan: Plan,
    ratio: float,
    swap: float,
    stretch: float,
) -> Iterator[Row]:
    """Compare the policies in one case: learned on the tuning runs, played on the held-out ones."""
    base: float | None = None
    for policy in (LEAST_RECENTLY_USED, learn(tuning), FORESEEN):
        rng = random.Random(plan.seed)
        sessions = [_play(held_out, rng, plan.steps) for _ in range(round(ratio * plan.slots))]
        waits = Simulation(policy, plan.slots, swap).run(sessions)
        condition = (
            f"{ratio:g} sessions a slot, swap {swap:g} s, pauses x {stretch:g}: {policy.name}"
        )
        row = speed_row(condition, "wait behind a pause", "seconds", waits, slots=plan.slots)
        base = row["p95"] if base is None else base
        if base > 0:
            against = round(row["p95"] / base, 3)
            row = {**row, "ratio_to": "p95 of least recently used", "ratio": against}
        yield row


def _stretch(run: Run, factor: float) -> Run:
    return tuple(
        Step(step.turn_seconds, min(LONGEST_SECONDS, factor * step.pause_seconds), step.tool)
        for step in run
    )


def _play(runs: Sequence[Run], rng: random.Random, steps: int) -> Iterator[Step]:
    """Play runs one after the other, from a random one on, in a random order."""
    order = rng.sample(list(runs), len(runs))
    endless = chain.from_iterable(order for _ in range(steps))
    every = (step for run in endless for step in run)
    return islice(every, rng.randrange(20), steps)


BENCHMARK = Benchmark(
    "pause-slots", "whose slot is given away in a pause, on recorded pauses", Plan, measure
)
