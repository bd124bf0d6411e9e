"""Overview of a tenant's last minutes."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from kvrecall import client
from services.feed.activity import COUNTED, STEP_SECONDS, STEPS, Step, add_up

ActivityT = TypeVar("ActivityT", bound=client.Activity)


def to_overview(
    steps: Sequence[Step], since: float, sessions: int, active: Mapping[str, int]
) -> client.Overview:
    """Convert the counts of steps, the number of sessions and the states of active ones."""
    begin = max(since, steps[0].at)
    return client.Overview(
        window_seconds=STEPS * STEP_SECONDS,
        step_seconds=STEP_SECONDS,
        since=datetime.fromtimestamp(begin, UTC),
        sessions=sessions,
        active=active,
        totals=_to_activity(client.Activity, add_up(steps, begin)),
        steps=tuple(
            _to_activity(client.ActivityStep, step, at=datetime.fromtimestamp(step.at, UTC))
            for step in steps
        ),
    )


def _to_activity(kind: type[ActivityT], step: Step, **given: Any) -> ActivityT:
    """Convert the counts of a step, or of several."""
    return kind(
        **{name: step.counts[name] for name in COUNTED},
        first_token_seconds_p50=step.get_quantile(0.5),
        first_token_seconds_p95=step.get_quantile(0.95),
        **given,
    )
