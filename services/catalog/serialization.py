"""Encodings that all catalogs share: values as JSON, packed tokens, cursors of session lists."""

import array
import base64
import binascii
import json
import sys
import zlib

from pydantic import TypeAdapter

from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.domain.tool_calls import ToolOutput

SETTINGS = TypeAdapter(SessionSettings)
MEMORY = TypeAdapter(MemoryReport)
MESSAGES = TypeAdapter(tuple[Message, ...])
OUTCOME = TypeAdapter(TurnOutcome)
REPAIR = TypeAdapter(RepairReport)
OUTPUT = TypeAdapter(ToolOutput)

_SEAL_BYTES = 4
DAMAGED = "stored bytes do not match their checksum; restore a backup"


def encode_tokens(token_ids: tuple[int, ...]) -> bytes:
    """Encode token ids as little-endian uint32."""
    values = array.array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def decode_tokens(data: bytes) -> tuple[int, ...]:
    """Decode token ids from little-endian uint32."""
    values = array.array("I", data)
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


def seal(data: bytes, *texts: str) -> bytes:
    """Append a checksum (CRC-32), by which `unseal` tells damaged bytes from whole ones.

    It covers `texts` that are stored beside them as well.
    """
    return data + _checksum(data, *texts).to_bytes(_SEAL_BYTES, "little")


def unseal(sealed: bytes, *texts: str) -> bytes:
    """Return the bytes that were sealed. Raises ValueError if they or `texts` are not as they were."""
    data = sealed[:-_SEAL_BYTES]
    if seal(data, *texts) != sealed:
        raise ValueError(DAMAGED)
    return data


def seal_text(text: bytes, beside: bytes) -> bytes:
    """Put a checksum (CRC-32, 8 hexadecimal digits) of both before a JSON object's text."""
    return b"%08x" % zlib.crc32(beside, zlib.crc32(text)) + text


def unseal_text(sealed: bytes, beside: bytes) -> bytes:
    """Return the text that was sealed. Raises ValueError if it or `beside` is not as it was."""
    text = sealed[2 * _SEAL_BYTES :]
    if seal_text(text, beside) != sealed:
        raise ValueError(DAMAGED)
    return text


def _checksum(data: bytes, *texts: str) -> int:
    value = zlib.crc32(data)
    for text in texts:
        value = zlib.crc32(text.encode(), value)
    return value


def pack(state: bytes) -> bytes:
    """Compress a worker state, to about a quarter, at the fastest level of zlib."""
    return zlib.compress(state, 1)


def unpack(packed: bytes) -> bytes:
    """Return what was packed. Raises ValueError if it is damaged."""
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise ValueError(f"a stored state is damaged: {error}") from error


def encode_cursor(session: Session) -> str:
    """Encode the position right after `session` in a list by creation, as opaque text."""
    return encode_place(session.created_at, session.id)


def encode_place(value: float, session_id: str) -> str:
    """Encode the position right after a session in a list that is ordered by this value."""
    return base64.urlsafe_b64encode(json.dumps([value, session_id]).encode()).decode()


def decode_cursor(cursor: str) -> tuple[float, str]:
    """Decode a cursor into a value, as the creation time, and a session id. Raises InvalidRequest."""
    try:
        created, session_id = json.loads(
            base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
        )
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise _build_invalid_cursor() from error
    is_time = isinstance(created, int | float) and not isinstance(created, bool)
    if not is_time or not isinstance(session_id, str):
        raise _build_invalid_cursor()
    return float(created), session_id


def _build_invalid_cursor() -> InvalidRequest:
    return InvalidRequest(
        "cursor", "not a cursor of this service; leave it out to start from the newest"
    )
