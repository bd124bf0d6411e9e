"""How both catalogs write the domain's values: as JSON, as packed tokens; and where a list of sessions goes on."""

import array
import base64
import binascii
import json
import sys

from pydantic import TypeAdapter

from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome
from kvrecall.domain.session import Session
from kvrecall.domain.session_settings import SessionSettings

SETTINGS = TypeAdapter(SessionSettings)
MEMORY = TypeAdapter(MemoryReport)
MESSAGES = TypeAdapter(tuple[Message, ...])
OUTCOME = TypeAdapter(TurnOutcome)
REPAIR = TypeAdapter(RepairReport)
PIECES = TypeAdapter(dict[int, str])


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
        created, session = json.loads(
            base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
        )
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(
            "cursor", "not a cursor of this service; leave it out to start from the newest"
        ) from error
    if (
        isinstance(created, bool)
        or not isinstance(created, int | float)
        or not isinstance(session, str)
    ):
        raise InvalidRequest(
            "cursor", "not a cursor of this service; leave it out to start from the newest"
        )
    return float(created), session
