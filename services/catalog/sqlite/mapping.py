"""The domain's values as rows of the SQLite catalog, and back."""

import sqlite3

from kvrecall.domain.messages import ToolCall
from kvrecall.domain.reports import RepairReport
from kvrecall.domain.session import Session, SharedPages, Turn
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from services.catalog.base import (
    EpisodeRecord,
    EpisodeSet,
    RepairDetails,
    RepairRecord,
    SegmentRecord,
)
from services.catalog.serialization import (
    MEMORY,
    MESSAGES,
    OUTCOME,
    PIECES,
    REPAIR,
    SETTINGS,
    token_bytes,
    token_values,
)

EPISODE_SET_COLUMNS = (
    "segments",
    "built_segments",
    "builds",
    "next_token",
    "last_turn",
    "last_utterance",
    "dimensions",
)
"""The columns of `episode_sets` that the care of episodes writes; `active` is written by turns."""


def session_row(session: Session) -> tuple[object, ...]:
    """The columns of `sessions`, in order."""
    settings = SETTINGS.dump_json(session.settings).decode()
    memory = MEMORY.dump_json(session.memory).decode()
    return (
        session.id,
        session.epoch,
        settings,
        session.created_at,
        session.updated_at,
        session.turns,
        memory,
        session.output_due,
        session.worker,
        session.settings.tenant,
        session.memory.length,
    )


def session_value(
    row: sqlite3.Row,
    calls: tuple[PendingCall, ...],
    repairs: tuple[RepairReport, ...],
    shared: tuple[SharedPages, ...],
) -> Session:
    """The session of a row, with what hangs on it."""
    return Session(
        id=row["id"],
        epoch=row["epoch"],
        settings=SETTINGS.validate_json(row["settings"]),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        turns=row["turns"],
        memory=MEMORY.validate_json(row["memory"]),
        calls=calls,
        repairs=repairs,
        output_due=row["output_due"],
        shared=shared,
        worker=row["worker"],
    )


def turn_row(turn: Turn) -> tuple[object, ...]:
    """The columns of `turns`, in order."""
    messages = MESSAGES.dump_json(turn.messages).decode()
    outcome = OUTCOME.dump_json(turn.outcome).decode()
    said = token_bytes(turn.utterance_tokens)
    return (turn.session, turn.number, messages, token_bytes(turn.token_ids), outcome, said)


def turn_value(row: sqlite3.Row) -> Turn:
    """The turn of a row."""
    return Turn(
        session=row["session"],
        number=row["number"],
        messages=MESSAGES.validate_json(row["messages"]),
        token_ids=token_values(row["token_ids"]),
        outcome=OUTCOME.validate_json(row["outcome"]),
        utterance_tokens=token_values(row["utterance_tokens"]),
    )


def call_value(row: sqlite3.Row) -> PendingCall:
    """The tool call of a row."""
    return PendingCall(
        turn=row["turn"],
        position=row["position"],
        call=ToolCall(row["id"], row["name"], row["arguments"]),
        status=CallStatus(row["status"]),
        result=row["result"],
        started=bool(row["started"]),
        arguments=row["running"],
        pieces=PIECES.validate_json(row["pieces"]),
        last_event_at=row["last_event_at"],
        batch=row["batch"],
        call_signal=row["call_signal"],
        delta_due=row["delta_due"],
        delta_repaired=row["delta_repaired"],
        result_repaired=bool(row["result_repaired"]),
        consumed_in_turn=row["said"],
    )


def pieces_text(call: PendingCall) -> str:
    """The column `pieces` of a call."""
    return PIECES.dump_json(dict(call.pieces)).decode()


def repair_columns(report: RepairReport, details: RepairDetails) -> tuple[str, str, bytes]:
    """The columns report, signal and positions of `repairs`."""
    return REPAIR.dump_json(report).decode(), details.signal, token_bytes(details.positions)


def repair_value(row: sqlite3.Row) -> RepairRecord:
    """The repair of a row."""
    details = RepairDetails(row["signal"], token_values(row["positions"]))
    return RepairRecord(
        row["number"], row["turn"], row["at"], REPAIR.validate_json(row["report"]), details
    )


def episode_row(session: str, number: int, episode: EpisodeRecord) -> tuple[object, ...]:
    """The columns of `episodes`, in order."""
    size = (episode.segments, episode.tokens)
    return (session, number, episode.id, episode.centroid, *size, episode.medoid, episode.matched)


def episode_value(row: sqlite3.Row) -> EpisodeRecord:
    """The episode of a row."""
    return EpisodeRecord(
        id=row["id"],
        centroid=row["centroid"],
        segments=row["segments"],
        tokens=row["tokens"],
        medoid=row["medoid"],
        matched=row["matched"],
    )


def episode_set_value(row: sqlite3.Row, episodes: tuple[EpisodeRecord, ...]) -> EpisodeSet:
    """The set of a row, with its episodes."""
    return EpisodeSet(
        **{name: row[name] for name in EPISODE_SET_COLUMNS}, active=row["active"], episodes=episodes
    )


def episode_set_row(found: EpisodeSet) -> tuple[object, ...]:
    """The values of `EPISODE_SET_COLUMNS`, in order."""
    return tuple(getattr(found, name) for name in EPISODE_SET_COLUMNS)


def segment_row(session: str, segment: SegmentRecord) -> tuple[object, ...]:
    """The columns of `segments`, in order."""
    return (session, segment.number, segment.start, segment.stop, segment.vector, segment.label)


def segment_value(row: sqlite3.Row) -> SegmentRecord:
    """The segment of a row."""
    return SegmentRecord(row["number"], row["start"], row["stop"], row["vector"], row["label"])
