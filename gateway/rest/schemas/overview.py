"""Overview of a tenant's last minutes, and the version of the service."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from gateway.rest.schemas.base import View
from services.feed.activity import COUNTED, STEP_SECONDS, STEPS, Step, add_up


class ActivityView(View):
    """What was counted. Times to the first token are upper bounds of buckets, null without any."""

    turns: int
    failed_turns: int
    failed_creations: int
    retried_turns: int
    prompt_tokens: int
    output_tokens: int
    not_durable_turns: int
    repairs: int
    failed_repairs: int
    promoted: int
    in_pause_repairs: int
    timeouts: int
    rebuilt_pages: int
    moves: int
    first_tokens: int
    first_token_seconds_p50: float | None
    first_token_seconds_p95: float | None

    @classmethod
    def from_domain(cls, step: Step) -> "ActivityView":
        """Convert from the counts of a step, or of several."""
        return cls(
            **{name: step.counts[name] for name in COUNTED},
            first_token_seconds_p50=step.get_quantile(0.5),
            first_token_seconds_p95=step.get_quantile(0.95),
        )


class ActivityStepView(ActivityView):
    """What was counted from `at` on, for `step_seconds` of the overview."""

    at: datetime


class OverviewView(View):
    """What this gateway did for the tenant in the last 15 minutes, or `since` it was started.

    `sessions` is the number of the tenant's sessions; `active` counts those in which this gateway
    runs a turn or a repair, by state. `steps` are oldest first.
    """

    window_seconds: int
    step_seconds: int
    since: datetime
    sessions: int
    active: dict[str, int]
    totals: ActivityView
    steps: list[ActivityStepView]

    @classmethod
    def from_domain(
        cls, steps: Sequence[Step], since: float, sessions: int, active: Mapping[str, int]
    ) -> "OverviewView":
        """Convert from the counts of steps, the number of sessions and the states of active ones."""
        begin = max(since, steps[0].at)
        return cls(
            window_seconds=STEPS * STEP_SECONDS,
            step_seconds=STEP_SECONDS,
            since=datetime.fromtimestamp(begin, UTC),
            sessions=sessions,
            active=dict(active),
            totals=ActivityView.from_domain(add_up(steps, begin)),
            steps=[
                ActivityStepView(
                    **ActivityView.from_domain(step).model_dump(),
                    at=datetime.fromtimestamp(step.at, UTC),
                )
                for step in steps
            ],
        )


class VersionView(View):
    """Version of the service, the revision of its source where that is known, and its model.

    `protocol` is the version of the wire to workers. `model` and `fingerprint` are empty until a worker
    has joined.
    """

    version: str
    revision: str
    protocol: int
    model: str
    fingerprint: str
