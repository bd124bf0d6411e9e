"""Repairs: in a turn's memory, and the repair history of a session."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from gateway.rest.schemas.public import copy_to, to_time
from kvrecall import client
from kvrecall.domain.reports import RepairReport
from services.catalog.records import RepairRecord
from services.repairs.history import RepairHistoryEntry

RecordT = TypeVar("RecordT", bound=client.PauseRepair)


def to_repair_totals(repairs: Sequence[RepairReport], skipped: int) -> client.RepairTotals:
    """Sum up the repairs since the previous turn."""
    return client.RepairTotals(
        repairs=len(repairs),
        signals=tuple(dict.fromkeys(repair.trigger for repair in repairs)),
        scored_rows=sum(repair.scored_rows for repair in repairs),
        promoted=sum(repair.promoted for repair in repairs),
        demoted=sum(repair.demoted for repair in repairs),
        seconds=sum(repair.seconds for repair in repairs),
        truncated=sum(repair.truncated for repair in repairs),
        skipped=skipped,
    )


def to_pause_repair(record: RepairRecord) -> client.PauseRepair:
    """Convert a repair as it is stored."""
    return _to_recorded(client.PauseRepair, record)


def to_repairs(session: str, entries: Sequence[RepairHistoryEntry]) -> client.Repairs:
    """Convert a session's repair history."""
    return client.Repairs(session, tuple(_to_past_repair(entry) for entry in entries))


def _to_past_repair(entry: RepairHistoryEntry) -> client.PastRepair:
    passages = tuple(copy_to(client.Passage, passage) for passage in entry.passages)
    return _to_recorded(client.PastRepair, entry.record, passages=passages)


def _to_recorded(kind: type[RecordT], record: RepairRecord, **given: Any) -> RecordT:
    report = record.report
    return copy_to(
        kind,
        report,
        number=record.number,
        turn=record.turn,
        at=datetime.fromtimestamp(record.at, UTC),
        started_at=to_time(report.started_at),
        call_id=report.call_id or None,
        signal=record.details.signal,
        **given,
    )
