"""The domain's values as rows of the SQLite catalog, by column name, and back."""

import sqlite3
from collections.abc import Mapping

from kvrecall.domain.messages import ToolCall
from kvrecall.domain.reports import RepairReport
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from services.catalog.encryption.cipher import Cipher
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


def to_session_row(session: Session, cipher: Cipher) -> Row:
    """Convert to a row of `sessions`."""
    settings = SETTINGS.dump_json(session.settings).decode()
    return {
        "id": session.id,
        "epoch": session.epoch,
        "settings": cipher.seal_text(settings, f"sessions.settings {session.id}"),
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
    row: sqlite3.Row,
    calls: tuple[PendingCall, ...],
    repairs: tuple[RepairReport, ...],
    cipher: Cipher,
) -> Session:
    """Convert from a row of `sessions` and the values of other tables."""
    settings = cipher.open_text(row["settings"], f"sessions.settings {row['id']}")
    return Session(
        id=row["id"],
        epoch=row["epoch"],
        settings=SETTINGS.validate_json(settings),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        turns=row["turns"],
        memory=MEMORY.validate_json(row["memory"]),
        calls=calls,
        repairs=repairs,
        output_due=row["output_due"],
        worker=row["worker"],
    )


def to_turn_row(turn: Turn, cipher: Cipher) -> Row:
    """Convert to a row of `turns`; a checksum covers its texts, too.

    Forks copy rows, so their places do not name the session.
    """
    number = turn.number
    messages = MESSAGES.dump_json(turn.messages).decode()
    outcome = OUTCOME.dump_json(turn.outcome).decode()
    # With the checksum, which would tell whether a guess of the texts is right.
    counts = seal(encode_tokens(turn.utterance_tokens), messages, outcome)
    return {
        "session": turn.session,
        "number": number,
        "messages": cipher.seal_text(messages, f"turns.messages {number}"),
        "token_ids": cipher.seal(seal(encode_tokens(turn.token_ids)), f"turns.token_ids {number}"),
        "outcome": cipher.seal_text(outcome, f"turns.outcome {number}"),
        "utterance_tokens": cipher.seal(counts, f"turns.utterance_tokens {number}"),
    }


def from_turn_row(row: sqlite3.Row, cipher: Cipher) -> Turn:
    """Convert from a row of `turns`. Raises ValueError for a damaged one."""
    number = row["number"]
    messages = cipher.open_text(row["messages"], f"turns.messages {number}")
    outcome = cipher.open_text(row["outcome"], f"turns.outcome {number}")
    counts = cipher.open(row["utterance_tokens"], f"turns.utterance_tokens {number}")
    return Turn(
        session=row["session"],
        number=number,
        utterance_tokens=decode_tokens(unseal(counts, messages, outcome)),
        messages=MESSAGES.validate_json(messages),
        token_ids=open_token_ids(row, cipher),
        outcome=OUTCOME.validate_json(outcome),
    )


def open_token_ids(row: sqlite3.Row, cipher: Cipher) -> tuple[int, ...]:
    """Read the token ids of a row of `turns`. Raises ValueError for a damaged one."""
    sealed = cipher.open(row["token_ids"], f"turns.token_ids {row['number']}")
    return decode_tokens(unseal(sealed))


def seal_of_call(cipher: Cipher, column: str, call_id: str, text: str | None) -> str | bytes | None:
    """Encrypt a text of a tool call. Its place is the call's id, by which rows are changed."""
    return None if text is None else cipher.seal_text(text, f"tool_calls.{column} {call_id}")


def seal_call_signal(cipher: Cipher, position: int, text: str) -> str | bytes:
    """Encrypt the signal of a repair on a call, which is known by its position in its turn."""
    return cipher.seal_text(text, f"tool_calls.call_signal {position}")


def to_call_row(session_id: str, call: PendingCall, cipher: Cipher) -> Row:
    """Convert to a row of `tool_calls`."""
    id = call.call.id
    return {
        "session": session_id,
        "turn": call.turn,
        "position": call.position,
        "id": id,
        "name": seal_of_call(cipher, "name", id, call.call.name),
        "arguments": seal_of_call(cipher, "arguments", id, call.call.arguments),
        "status": call.status.value,
        "result": seal_of_call(cipher, "result", id, call.result),
        "started": call.started,
        "running": seal_of_call(cipher, "running", id, call.arguments),
        "output": encode_output(call),
        "last_event_at": call.last_event_at,
        "batch": call.batch,
        "call_signal": seal_call_signal(cipher, call.position, call.call_signal),
        "delta_due": call.delta_due,
        "delta_repaired": call.delta_repaired,
        "result_repaired": call.result_repaired,
        "consumed_in_turn": call.consumed_in_turn,
    }


def from_call_row(row: sqlite3.Row, cipher: Cipher) -> PendingCall:
    """Convert from a row of `tool_calls`."""
    id = row["id"]

    def open_text(column: str) -> str:
        return cipher.open_text(row[column], f"tool_calls.{column} {id}")

    signal = cipher.open_text(row["call_signal"], f"tool_calls.call_signal {row['position']}")
    return PendingCall(
        turn=row["turn"],
        position=row["position"],
        call=ToolCall(id, open_text("name"), open_text("arguments")),
        status=CallStatus(row["status"]),
        result=None if row["result"] is None else open_text("result"),
        started=bool(row["started"]),
        arguments=open_text("running"),
        output=OUTPUT.validate_json(row["output"]),
        last_event_at=row["last_event_at"],
        batch=row["batch"],
        call_signal=signal,
        delta_due=row["delta_due"],
        delta_repaired=row["delta_repaired"],
        result_repaired=bool(row["result_repaired"]),
        consumed_in_turn=row["consumed_in_turn"],
    )


def encode_output(call: PendingCall) -> str:
    """Encode the column `output` of a call."""
    return OUTPUT.dump_json(call.output).decode()


def to_piece_rows(
    session_id: str, call: CallPosition, pieces: Mapping[int, str], cipher: Cipher
) -> list[Row]:
    """Convert to rows of `tool_output`."""
    turn, position = call
    at = {"session": session_id, "turn": turn, "position": position}
    return [
        {**at, "piece": index, "text": cipher.seal_text(text, _get_piece_place(call, index))}
        for index, text in pieces.items()
    ]


def from_piece_row(row: sqlite3.Row, call: CallPosition, cipher: Cipher) -> str:
    """Convert from `piece` and `text` of a row of `tool_output`."""
    return cipher.open_text(row["text"], _get_piece_place(call, row["piece"]))


def _get_piece_place(call: CallPosition, piece: int) -> str:
    turn, position = call
    return f"tool_output.text {turn} {position} {piece}"


def to_repair_row(session_id: str, record: RepairRecord, cipher: Cipher) -> Row:
    """Convert to a row of `repairs`."""
    signal = cipher.seal_text(record.details.signal, f"repairs.signal {record.number}")
    return {
        "session": session_id,
        "number": record.number,
        "turn": record.turn,
        "at": record.at,
        "report": REPAIR.dump_json(record.report).decode(),
        "signal": signal,
        "positions": seal(encode_tokens(record.details.positions)),
    }


def from_repair_row(row: sqlite3.Row, cipher: Cipher) -> RepairRecord:
    """Convert from a row of `repairs`."""
    signal = cipher.open_text(row["signal"], f"repairs.signal {row['number']}")
    return RepairRecord(
        number=row["number"],
        turn=row["turn"],
        at=row["at"],
        report=REPAIR.validate_json(row["report"]),
        details=RepairDetails(signal, decode_tokens(unseal(row["positions"]))),
    )


def to_episode_row(session_id: str, number: int, episode: EpisodeRecord, cipher: Cipher) -> Row:
    """Convert to a row of `episodes`."""
    return {
        "session": session_id,
        "number": number,
        "id": episode.id,
        "centroid": cipher.seal(episode.centroid, f"episodes.centroid {episode.id}"),
        "segments": episode.segments,
        "tokens": episode.tokens,
        "medoid": cipher.seal_text(episode.medoid, f"episodes.medoid {episode.id}"),
        "matched": episode.matched,
    }


def from_episode_row(row: sqlite3.Row, cipher: Cipher) -> EpisodeRecord:
    """Convert from a row of `episodes`."""
    return EpisodeRecord(
        id=row["id"],
        centroid=cipher.open(row["centroid"], f"episodes.centroid {row['id']}"),
        segments=row["segments"],
        tokens=row["tokens"],
        medoid=cipher.open_text(row["medoid"], f"episodes.medoid {row['id']}"),
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


def to_segment_row(session_id: str, segment: SegmentRecord, cipher: Cipher) -> Row:
    """Convert to a row of `segments`."""
    return {
        "session": session_id,
        "number": segment.number,
        "start": segment.start,
        "stop": segment.stop,
        "vector": cipher.seal(segment.vector, f"segments.vector {segment.number}"),
        "label": segment.label,
    }


def from_segment_row(row: sqlite3.Row, cipher: Cipher) -> SegmentRecord:
    """Convert from a row of `segments`."""
    vector = cipher.open(row["vector"], f"segments.vector {row['number']}")
    return SegmentRecord(row["number"], row["start"], row["stop"], vector, row["label"])
