"""Repairs: in a turn's memory, and the repair history of a session."""

from collections.abc import Sequence
from datetime import UTC, datetime

from gateway.rest.schemas.base import View
from kvrecall.domain.reports import RepairReport
from services.repair_history import RepairHistoryEntry


class RepairView(View):
    """Repair: its signal, the rows scored, promoted and demoted. Times in seconds, rows in tokens.

    `observed_tokens` of the signal's `signal_tokens` were observed: fewer beyond the worker's
    `signal_tokens` setting, or when the repair was `truncated`.
    `scored_rows` of `candidates` evicted tokens were scored, the fraction `share_scanned`: fewer
    when bounds excluded the others, or when a deadline or a new turn `truncated` the repair.
    `demoted` rows left the active set in exchange. `in_pause`: it ended before the next turn.
    """

    trigger: str
    signal_tokens: int
    observed_tokens: int
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


class RepairTotalsView(View):
    """Totals over the repairs since the previous turn, and their signals.

    `truncated` counts those stopped by a deadline or by the turn, `skipped` those that were pending
    and not started.
    """

    repairs: int
    signals: list[str]
    scored_rows: int
    promoted: int
    demoted: int
    seconds: float
    truncated: int
    skipped: int

    @classmethod
    def from_domain(cls, repairs: Sequence[RepairReport], skipped: int) -> "RepairTotalsView":
        """Sum up the repairs since the previous turn."""
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


class PassageView(View):
    """Promoted tokens `start` to `stop` - 1 of the session, with the text around them."""

    start: int
    stop: int
    before: str
    promoted: str
    after: str


class PastRepairView(RepairView):
    """Repair of the history: the turn it was run for, its time, its signal, the promoted text."""

    number: int
    turn: int
    at: datetime
    signal: str
    passages: list[PassageView]

    @classmethod
    def from_domain(cls, entry: RepairHistoryEntry) -> "PastRepairView":
        """Convert from an entry of the repair history."""
        record = entry.record
        return cls(
            **RepairView.model_validate(record.report).model_dump(),
            number=record.number,
            turn=record.turn,
            at=datetime.fromtimestamp(record.at, UTC),
            signal=record.details.signal,
            passages=[PassageView.model_validate(passage) for passage in entry.passages],
        )


class RepairsView(View):
    """Last repairs of a session, newest first."""

    session: str
    repairs: list[PastRepairView]

    @classmethod
    def from_domain(cls, session: str, entries: Sequence[RepairHistoryEntry]) -> "RepairsView":
        """Convert from a session's repair history."""
        return cls(
            session=session, repairs=[PastRepairView.from_domain(entry) for entry in entries]
        )
