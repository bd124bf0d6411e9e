"""The domain's values as rows of the SQLite catalog, by column name, and back."""

import sqlite3
from collections.abc import Mapping

from kvrecall.domain.messages import ToolCall
from kvrecall.domain.reports import RepairReport
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from services.catalog.records import (
    CallPosition,
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
    OUTPUT,
    REPAIR,
    SETTINGS,
    decode_tokens,
    encode_tokens,
    seal,
    unseal,
)
from services.catalog.sqlite.storage.queries import Row

# The columns of `episode_sets` that episode maintenance writes; turns write `active`.
EPISODE_SET_COLUMNS = (
    "segments",
    "built_segments",
    "builds",
    "next_token",
    "last_turn",
    "last_utterance",
    "dimensions",
)


def to_session_row(session: Session) -> Row:
    """Convert to a row of `sessions`."""
    return {
        "id": session.id,
        "epoch": session.epoch,
        "settings": SETTINGS.dump_json(session.settings).decode(),
        "created_at": session.created_at,
        "updated_at": session.updated_at,
        "turns": session.turns,
        "memory": MEMORY.dump_json(session.memory).decode(),
        "output_due": session.output_due,
        "worker": session.worker,
        "tenant": session.settings.tenant,
        "length": session.memory.length,
    }


def from_session_row(
    row: sqlite3.Row, calls: tuple[PendingCall, ...], repairs: tuple[RepairReport, ...]
) -> Session:
    """Convert from a row of `sessions` and the values of other tables."""
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
        worker=row["worker"],
    )


def to_turn_row(turn: Turn) -> Row:
    """Convert to a row of `turns`; a checksum covers its texts, too."""
    messages = MESSAGES.dump_json(turn.messages).decode()
    outcome = OUTCOME.dump_json(turn.outcome).decode()
    return {
        "session": turn.session,
        "number": turn.number,
        "messages": messages,
        "token_ids": seal(encode_tokens(turn.token_ids)),
        "outcome": outcome,
        "utterance_tokens": seal(encode_tokens(turn.utterance_tokens), messages, outcome),
    }


def from_turn_row(row: sqlite3.Row) -> Turn:
    """Convert from a row of `turns`. Raises ValueError for a damaged one."""
    utterance_tokens = unseal(row["utterance_tokens"], row["messages"], row["outcome"])
    return Turn(
        session=row["session"],
        number=row["number"],
        messages=MESSAGES.validate_json(row["messages"]),
        token_ids=decode_tokens(unseal(row["token_ids"])),
        outcome=OUTCOME.validate_json(row["outcome"]),
        utterance_tokens=decode_tokens(utterance_tokens),
    )


def to_call_row(session_id: str, call: PendingCall) -> Row:
    """Convert to a row of `tool_calls`."""
    return {
        "session": session_id,
        "turn": call.turn,
        "position": call.position,
        "id": call.call.id,
        "name": call.call.name,
        "arguments": call.call.arguments,
        "status": call.status.value,
        "result": call.result,
        "started": call.started,
        "running": call.arguments,
        "output": encode_output(call),
        "last_event_at": call.last_event_at,
        "batch": call.batch,
        "call_signal": call.call_signal,
        "delta_due": call.delta_due,
        "delta_repaired": call.delta_repaired,
        "result_repaired": call.result_repaired,
        "consumed_in_turn": call.consumed_in_turn,
    }


def from_call_row(row: sqlite3.Row) -> PendingCall:
    """Convert from a row of `tool_calls`."""
    return PendingCall(
        turn=row["turn"],
        position=row["position"],
        call=ToolCall(row["id"], row["name"], row["arguments"]),
        status=CallStatus(row["status"]),
        result=row["result"],
        started=bool(row["started"]),
        arguments=row["running"],
        output=OUTPUT.validate_json(row["output"]),
        last_event_at=row["last_event_at"],
        batch=row["batch"],
        call_signal=row["call_signal"],
        delta_due=row["delta_due"],
        delta_repaired=row["delta_repaired"],
        result_repaired=bool(row["result_repaired"]),
        consumed_in_turn=row["consumed_in_turn"],
    )


def encode_output(call: PendingCall) -> str:
    """Encode the column `output` of a call."""
    return OUTPUT.dump_json(call.output).decode()


def to_piece_rows(session_id: str, call: CallPosition, pieces: Mapping[int, str]) -> list[Row]:
    """Convert to rows of `tool_output`."""
    turn, position = call
    return [
        {"session": session_id, "turn": turn, "position": position, "piece": index, "text": text}
        for index, text in pieces.items()
    ]


def to_repair_row(session_id: str, record: RepairRecord) -> Row:
    """Convert to a row of `repairs`."""
    return {
        "session": session_id,
        "number": record.number,
        "turn": record.turn,
        "at": record.at,
        "report": REPAIR.dump_json(record.report).decode(),
        "signal": record.details.signal,
        "positions": seal(encode_tokens(record.details.positions)),
    }


def from_repair_row(row: sqlite3.Row) -> RepairRecord:
    """Convert from a row of `repairs`."""
    return RepairRecord(
        number=row["number"],
        turn=row["turn"],
        at=row["at"],
        report=REPAIR.validate_json(row["report"]),
        details=RepairDetails(row["signal"], decode_tokens(unseal(row["positions"]))),
    )


def to_episode_row(session_id: str, number: int, episode: EpisodeRecord) -> Row:
    """Convert to a row of `episodes`."""
    return {
        "session": session_id,
        "number": number,
        "id": episode.id,
        "centroid": episode.centroid,
        "segments": episode.segments,
        "tokens": episode.tokens,
        "medoid": episode.medoid,
        "matched": episode.matched,
    }


def from_episode_row(row: sqlite3.Row) -> EpisodeRecord:
    """Convert from a row of `episodes`."""
    return EpisodeRecord(
        id=row["id"],
        centroid=row["centroid"],
        segments=row["segments"],
        tokens=row["tokens"],
        medoid=row["medoid"],
        matched=row["matched"],
    )


def to_episode_set_row(session_id: str, episode_set: EpisodeSet) -> Row:
    """Convert to a row of `episode_sets` without an active episode."""
    counts = {name: getattr(episode_set, name) for name in EPISODE_SET_COLUMNS}
    return {"session": session_id, "active": ""} | counts


def from_episode_set_row(row: sqlite3.Row, episodes: tuple[EpisodeRecord, ...]) -> EpisodeSet:
    """Convert from a row of `episode_sets` and its episodes."""
    return EpisodeSet(
        **{name: row[name] for name in EPISODE_SET_COLUMNS}, active=row["active"], episodes=episodes
    )


def to_segment_row(session_id: str, segment: SegmentRecord) -> Row:
    """Convert to a row of `segments`."""
    return {
        "session": session_id,
        "number": segment.number,
        "start": segment.start,
        "stop": segment.stop,
        "vector": segment.vector,
        "label": segment.label,
    }


def from_segment_row(row: sqlite3.Row) -> SegmentRecord:
    """Convert from a row of `segments`."""
    return SegmentRecord(row["number"], row["start"], row["stop"], row["vector"], row["label"])
