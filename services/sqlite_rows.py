"""The domain's values as rows of the SQLite catalog, and back."""

import array
import base64
import binascii
import json
import sqlite3
import sys

from pydantic import TypeAdapter

from services.errors import InvalidRequest
from services.messages import Message, ToolCall
from services.reports import MemoryReport, RepairReport, TurnOutcome
from services.sessions import CallStatus, PendingCall, Session, SessionSettings, Turn

SETTINGS = TypeAdapter(SessionSettings)
MEMORY = TypeAdapter(MemoryReport)
MESSAGES = TypeAdapter(tuple[Message, ...])
OUTCOME = TypeAdapter(TurnOutcome)
REPAIR = TypeAdapter(RepairReport)


def session_row(session: Session) -> tuple[object, ...]:
    """The columns of `sessions`, in order."""
    settings = SETTINGS.dump_json(session.settings).decode()
    memory = MEMORY.dump_json(session.memory).decode()
    created, updated = session.created_at, session.updated_at
    return (session.id, session.epoch, settings, created, updated, session.turns, memory)


def session_value(row: sqlite3.Row, calls: tuple[PendingCall, ...], repairs: tuple[RepairReport, ...]) -> Session:
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
    )


def turn_row(turn: Turn) -> tuple[object, ...]:
    """The columns of `turns`, in order."""
    messages = MESSAGES.dump_json(turn.messages).decode()
    outcome = OUTCOME.dump_json(turn.outcome).decode()
    return (turn.session, turn.number, messages, token_bytes(turn.token_ids), outcome)


def turn_value(row: sqlite3.Row) -> Turn:
    """The turn of a row."""
    return Turn(
        session=row["session"],
        number=row["number"],
        messages=MESSAGES.validate_json(row["messages"]),
        token_ids=token_values(row["token_ids"]),
        outcome=OUTCOME.validate_json(row["outcome"]),
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
        partial=row["partial"],
        batch=row["batch"],
        call_repaired=bool(row["call_repaired"]),
        result_repaired=bool(row["result_repaired"]),
        said=row["said"],
    )


def token_bytes(token_ids: tuple[int, ...]) -> bytes:
    """Token ids as little-endian uint32."""
    values = array.array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def token_values(data: bytes) -> tuple[int, ...]:
    """Token ids from little-endian uint32."""
    values = array.array("I", data)
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


def cursor_text(session: Session) -> str:
    """An opaque cursor that stands behind `session`."""
    return base64.urlsafe_b64encode(json.dumps([session.created_at, session.id]).encode()).decode()


def cursor_value(cursor: str) -> tuple[float, str]:
    """Where a cursor stands. Raises InvalidRequest when it is not one of ours."""
    try:
        created, session = json.loads(base64.b64decode(cursor.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest("cursor", "not a cursor of this service; leave it out to start from the newest") from error
    if isinstance(created, bool) or not isinstance(created, int | float) or not isinstance(session, str):
        raise InvalidRequest("cursor", "not a cursor of this service; leave it out to start from the newest")
    return float(created), session
