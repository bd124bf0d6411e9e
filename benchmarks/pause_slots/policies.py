"""Policies: which paused session gives its slot away, and when one is swapped in ahead of its result."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

from benchmarks.pause_slots.recordings import Run, Step

Predict = Callable[[Step], float]
"""Seconds that the pause behind a step will take."""


@dataclass(frozen=True)
class Policy:
    """A policy by what it knows.

    Attributes:
        name: Name in results.
        predict: Seconds of a pause; None: nothing is known, and the longest paused session gives its slot.
    """

    name: str
    predict: Predict | None = None


LEAST_RECENTLY_USED = Policy("least recently used")
FORESEEN = Policy("every pause foreseen", lambda step: step.pause_seconds)


def learn(runs: Sequence[Run]) -> Policy:
    """Learn the median pause of each tool."""
    pauses = defaultdict[str, list[float]](list)
    for run in runs:
        for step in run:
            pauses[step.tool].append(step.pause_seconds)
    every = [seconds for each in pauses.values() for seconds in each]
    usual = _get_median(every)
    medians = {tool: _get_median(seconds) for tool, seconds in pauses.items()}
    return Policy("median pause of the tool", lambda step: medians.get(step.tool, usual))


def _get_median(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else quantiles(values, n=2)[0]
