"""Results of rounds and drills: counts, and failures of which there should be none."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

LOST_TURNS = "turns lost or twice"
DIFFERENT = "answers that differ"
AFTER_REBUILD = "answers that differ, after lost pages were computed again"
AWAKE = "answers that differ, of sessions that slept"
CONTENDED = "answers that differ, of contended sessions"
IN_TALKS = "answers that differ, of talks through OpenAI's APIs"
CHANGED = "answers that changed"
LOST_ROWS = "durable rows lost without damage"
TORN = "torn streams"
NOT_SERVED = "not served"
NOT_STARTED = "did not start"
WRONG_ERRORS = "errors of the server that no fault excuses"
LATE_ERRORS = "errors after all faults were undone"
SLOW_HEALTH = "health checks over the bound"
SLOW_REQUESTS = "requests over the bound"
HELD = "held without a session"
LEFT = "pages, rows and files left"
FSCK_BEFORE = "fsck before the deletions"
FSCK_AFTER = "fsck after the deletions"
BAD_EXITS = "bad exits"
STRAY = "stray processes"
DRILLS = "drills"
BROKEN = "rounds that broke off"
# Kinds of failures; each count is to stay at 0.
WRONG = (
    LOST_TURNS,
    DIFFERENT,
    AFTER_REBUILD,
    AWAKE,
    CONTENDED,
    IN_TALKS,
    CHANGED,
    LOST_ROWS,
    TORN,
    NOT_SERVED,
    NOT_STARTED,
    WRONG_ERRORS,
    LATE_ERRORS,
    SLOW_HEALTH,
    SLOW_REQUESTS,
    HELD,
    LEFT,
    FSCK_BEFORE,
    FSCK_AFTER,
    BAD_EXITS,
    STRAY,
    DRILLS,
    BROKEN,
)
FAULTS = "faults"


@dataclass
class Findings:
    """Counts by condition and name, and texts of failures by kind.

    Every list in `failures` should be empty.
    """

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def count(self, condition: str, counter: Counter[str]) -> None:
        """Add counts."""
        self.counts.setdefault(condition, Counter()).update(counter)

    def fail(self, kind: str, texts: Iterable[str]) -> None:
        """Add failures."""
        self.failures.setdefault(kind, []).extend(texts)

    def add(self, other: "Findings") -> None:
        """Add those of another round."""
        for condition, counter in other.counts.items():
            self.count(condition, counter)
        for kind, texts in other.failures.items():
            self.fail(kind, texts)

    @property
    def clean(self) -> bool:
        """True if there was no failure of any kind."""
        return not any(self.failures.values())

    @property
    def faults(self) -> int:
        """Number of faults."""
        return self.counts.get(FAULTS, Counter()).total()

    def write(self, file: Path) -> None:
        """Write them to a file, whole or not at all."""
        draft = file.with_suffix(".draft")
        draft.write_text(
            json.dumps({"counts": self.counts, "failures": self.failures}, indent=1),
            encoding="utf-8",
        )
        draft.replace(file)


def read_findings(file: Path) -> Findings:
    """Findings that were written to a file."""
    read = json.loads(file.read_text(encoding="utf-8"))
    counts = {condition: Counter(counter) for condition, counter in read["counts"].items()}
    return Findings(counts, read["failures"])
