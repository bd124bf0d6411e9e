"""Attacks on one door: requests by hypothesis, and a smaller one for each new kind of finding."""

from collections import Counter
from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import Flaky

from benchmarks.fuzz.doors.base import Door
from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.requests import Request

# Requests that are sent to find a smaller one for a finding.
SHRINKS = 40


class _FoundError(Exception):
    """Tells hypothesis that a request shows something, so that it looks for a smaller one."""


def attack(
    door: Door, seed: int, examples: int, findings: Findings, go_on: Callable[[], bool]
) -> None:
    """Send up to `examples` requests to a door, a function of the seed, and add the findings.

    A kind of finding that is new is looked for again in smaller requests, `SHRINKS` times at most.
    """
    tries: Counter[str] = Counter()
    new: set[str] = set()

    def send(request: Request) -> None:
        if not go_on():
            return
        reply = door.send(request)
        findings.count(door.name, reply.status)
        for problem in door.check(request, reply):
            if not findings.times(door.name, problem.kind):
                new.add(problem.kind)
            findings.add(door.name, problem, request)
            tries[problem.kind] += 1
            if problem.kind in new and tries[problem.kind] <= SHRINKS:
                raise _FoundError(problem.kind)

    run = hypothesis.seed(seed)(
        hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            derandomize=False,
        )(hypothesis.given(door.requests)(send))
    )
    try:
        run()
    except (_FoundError, Flaky):
        # The findings have it. A service that remembers need not answer twice the same.
        return
