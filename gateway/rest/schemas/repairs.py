"""Repairs: in a turn's memory, and the repair history of a session."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.rest.schemas.base import View
from kvrecall.domain.reports import RepairReport
from services.catalog.records import RepairRecord
from services.repair_history import RepairHistoryEntry


class RepairView(View):
    """Repair: its signal, the rows scored, promoted and demoted. Times in seconds, rows in tokens.

    `observed_tokens` of the signal's `signal_tokens` were observed: fewer beyond the worker's
    `signal_tokens` setting, or when the repair was `truncated`.
    `scored_rows` of `candidates` evicted tokens were scored, the fraction `share_scanned`: fewer
    when a deadline or a new turn `truncated` the repair.
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


class RepairRecordView(RepairView):
    """Repair of the history: the turn it was run for, its times, its signal.

    It was committed `at`, and `started_at` before. `call_id`: the tool call that it is conditioned
    on. Both are null where that is not known, `call_id` also for other signals.
    """

    number: int
    turn: int
    at: datetime
    started_at: datetime | None
    call_id: str | None
    signal: str

    @classmethod
    def from_record(cls, record: RepairRecord) -> "RepairRecordView":
        """Convert from a repair as it is stored."""
        return cls(**_read_record(record))


class PastRepairView(RepairRecordView):
    """Repair of the history with the text that it promoted."""

    passages: list[PassageView]

    @classmethod
    def from_domain(cls, entry: RepairHistoryEntry) -> "PastRepairView":
        """Convert from an entry of the repair history."""
        passages = [PassageView.model_validate(passage) for passage in entry.passages]
        return cls(**_read_record(entry.record), passages=passages)


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


def _read_record(record: RepairRecord) -> dict[str, Any]:
    report = record.report
    started = report.started_at
    return {
        **RepairView.model_validate(report).model_dump(),
        "number": record.number,
        "turn": record.turn,
        "at": datetime.fromtimestamp(record.at, UTC),
        "started_at": None if started is None else datetime.fromtimestamp(started, UTC),
        "call_id": report.call_id or None,
        "signal": record.details.signal,
    }
