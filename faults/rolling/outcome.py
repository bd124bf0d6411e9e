"""What a drill found: its steps with their times, and its totals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faults.findings import Findings
from faults.rolling.tally import Seen, Tally
from kvrecall_server.reporting.results import Row


@dataclass(frozen=True)
class Done:
    """A step that was done: monotonic times of its begin, of the process' return, and of its end."""

    done: str
    process: str
    begin: float
    served: float
    end: float

    @property
    def seconds(self) -> float:
        """Seconds from the begin until the process served again."""
        return self.served - self.begin


@dataclass(frozen=True)
class Outcome:
    """A drill that was run. `lost` and `doubled` are texts for acknowledged turns."""

    steps: Sequence[Done]
    tally: Tally
    turns: int
    lost: Sequence[str]
    doubled: Sequence[str]
    findings: Findings

    @property
    def clean(self) -> bool:
        """True if nothing was lost, doubled or wrong."""
        return not (self.lost or self.doubled) and self.findings.clean

    def errors_of(self, step: Done) -> list[Seen]:
        """Errors that clients saw during a step."""
        return self.tally.errors_between(step.begin, step.end)

    def build_rows(self) -> list[Row]:
        """Rows of a result file: a row for each step, then the totals."""
        steps = [
            {
                "condition": f"{step.done}: {step.process}",
                "metric": "until it served again",
                "unit": "seconds",
                "value": round(step.seconds, 2),
                "errors": _count(self.errors_of(step)),
                "longest_wait": round(self.tally.longest_wait(step.begin, step.end), 2),
            }
            for step in self.steps
        ]
        return [*steps, *self._build_totals()]

    def _build_totals(self) -> list[Row]:
        tally = self.tally
        waits = [wait.seconds for wait in tally.waits]
        median, p95 = (float(value) for value in np.percentile(waits or [0.0], [50, 95]))
        wrong = sum(len(texts) for texts in self.findings.failures.values())
        return [
            _total("turns acknowledged", "count", self.turns),
            _total("turns lost", "count", len(self.lost)),
            _total("turns doubled", "count", len(self.doubled)),
            _total("answers or errors that are wrong", "count", wrong),
            _total("errors seen by clients", "count", len(tally.errors))
            | {"errors": _count(tally.errors)},
            _total("errors retried with success", "count", tally.count_recovered(tally.errors)),
            _total(
                "repeated by the user, not by the client library", "count", tally.repeated.total()
            )
            | {"errors": dict(sorted(tally.repeated.items()))},
            _total("wait, longest", "seconds", round(max(waits, default=0.0), 2)),
            _total("wait, median", "seconds", round(median, 3)),
            _total("wait, 95th percentile", "seconds", round(p95, 3)),
        ]


def _total(metric: str, unit: str, value: float) -> dict[str, object]:
    return {"condition": "all", "metric": metric, "unit": unit, "value": value}


def _count(errors: Sequence[Seen]) -> dict[str, int]:
    return dict(sorted(Counter(seen.text for seen in errors).items()))
