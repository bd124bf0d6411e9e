"""What goes out over HTTP about repairs: in a turn's memory, and looking back."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvrecall.domain.reports import RepairReport
from services.repair_history import RepairHistoryEntry


class RepairView(BaseModel):
    """One repair. Times in seconds, rows as tokens.

    `scored_rows` of `candidates` evicted tokens were scored, the share `share_scanned`: fewer when the
    others could not have been selected, or when a deadline or a new turn `truncated` the repair.
    `demoted` rows left the active set in exchange. `in_pause`: it ended before the next turn.
    """

    model_config = ConfigDict(frozen=True, from_attributes=True)

    trigger: str
    signal_tokens: int
    candidates: int
    scored_rows: int
    share_scanned: float
    promoted: int
    demoted: int
    seconds: float
    truncated: bool
    hops: int
    bytes_read: int
    in_pause: bool


class RepairTotalsView(BaseModel):
    """All repairs since the turn before, together: how many, on which signals, what they did.

    `truncated` of them were ended by a deadline or by the turn; `skipped` were due but not started.
    """

    model_config = ConfigDict(frozen=True)

    repairs: int
    signals: list[str]
    scored_rows: int
    promoted: int
    demoted: int
    seconds: float
    truncated: int
    skipped: int

    @classmethod
    def of(cls, repairs: Sequence[RepairReport], skipped: int) -> "RepairTotalsView":
        """The sums."""
        return cls(
            repairs=len(repairs),
            signals=list(dict.fromkeys(repair.trigger for repair in repairs)),
            scored_rows=sum(repair.scored_rows for repair in repairs),
            promoted=sum(repair.promoted for repair in repairs),
            demoted=sum(repair.demoted for repair in repairs),
            seconds=sum(repair.seconds for repair in repairs),
            truncated=sum(repair.truncated for repair in repairs),
            skipped=skipped,
        )


class PassageView(BaseModel):
    """Tokens `start` to `stop` - 1 of the session, which a repair brought back, with the text around them."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    start: int
    stop: int
    before: str
    promoted: str
    after: str


class PastRepairView(RepairView):
    """A repair of the past: the turn it was run for, when, on which signal, and what it brought back."""

    number: int
    turn: int
    at: datetime
    signal: str
    passages: list[PassageView]


class RepairsView(BaseModel):
    """A session's last repairs, the newest first."""

    model_config = ConfigDict(frozen=True)

    session: str
    repairs: list[PastRepairView]

    @classmethod
    def of(cls, session: str, told: Sequence[RepairHistoryEntry]) -> "RepairsView":
        """The view of what was told."""
        return cls(session=session, repairs=[PastRepairView(**_past(each)) for each in told])


def _past(told: RepairHistoryEntry) -> dict[str, Any]:
    record = told.record
    report = RepairView.model_validate(record.report).model_dump()
    return report | {
        "number": record.number,
        "turn": record.turn,
        "at": datetime.fromtimestamp(record.at, UTC),
        "signal": record.details.signal,
        "passages": [PassageView.model_validate(passage) for passage in told.passages],
    }
