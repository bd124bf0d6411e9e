"""Counts of late: what is older than the window is gone, and each tenant has its own."""

from typing import Any

from kvrecall.domain.events import (
    PagesRebuilt,
    PauseTimedOut,
    TurnFailed,
    TurnFinished,
    TurnStart,
    TurnTiming,
)
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from services.feed.activity import BOUNDS, STEP_SECONDS, STEPS, Activity, add_up

WINDOW = STEP_SECONDS * STEPS


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def finish(session: str, first_token: float | None = None, tokens: int = 5) -> TurnFinished:
    outcome = TurnOutcome(session, 1, None, "stop", tokens, 2, MemoryReport(), (), {})
    return TurnFinished(outcome, TurnStart(), TurnTiming(9.0, 0.0, first_token))


async def test_counts_leave_with_the_window(harness: Any) -> None:
    session, clock = await harness.session(), Clock()
    activity = Activity(harness.service._sessions, clock)
    for _ in range(3):
        activity.observe(finish(session))
        clock.now += STEP_SECONDS
    assert [step.counts["turns"] for step in activity.get_steps("")] == [1, 1, 1, 0]
    clock.now += WINDOW - 2 * STEP_SECONDS
    steps = activity.get_steps("")
    assert len(steps) == STEPS
    assert add_up(steps, 0.0).counts["turns"] == 1
    clock.now += STEP_SECONDS
    assert add_up(activity.get_steps(""), 0.0).counts.total() == 0


async def test_tenants_have_their_own_counts(harness: Any) -> None:
    ann, ben = await harness.session(tenant="ann"), await harness.session(tenant="ben")
    activity = Activity(harness.service._sessions, Clock())
    activity.observe(finish(ann, tokens=7))
    activity.observe(TurnFailed(ben, "cancelled"))
    activity.observe(TurnFailed(ann, "unknown_session"))
    activity.observe(PauseTimedOut(ben, ("c1", "c2")))
    activity.observe(PagesRebuilt(ben, "one", 4, 0.5))
    activity.observe(finish("s_elsewhere"))
    totals = {name: add_up(activity.get_steps(name), 0.0).counts for name in ("ann", "ben", "")}
    assert +totals["ann"] == {"turns": 1, "prompt_tokens": 7, "output_tokens": 2}
    assert +totals["ben"] == {"failed_turns": 1, "timeouts": 2, "rebuilt_pages": 4}
    assert not totals[""]


async def test_quantiles_of_first_tokens_are_bounds_of_buckets(harness: Any) -> None:
    session = await harness.session()
    activity = Activity(harness.service._sessions, Clock())
    (step,) = activity.get_steps("")
    assert step.get_quantile(0.5) is None
    for index in range(100):
        activity.observe(finish(session, 0.02 if index < 60 else 0.8))
    activity.observe(finish(session))
    (step,) = activity.get_steps("")
    assert (step.get_quantile(0.5), step.get_quantile(0.95)) == (0.025, 1.0)
    assert step.first_tokens.total() == step.counts["first_tokens"] == 100
    activity.observe(finish(session, 10 * BOUNDS[-1]))
    assert activity.get_steps("")[0].get_quantile(1.0) == BOUNDS[-1]
