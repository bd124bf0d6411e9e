"""What a client reports of a tool call while a session is paused, and what it makes of the call. Pure."""

from dataclasses import dataclass, replace
from enum import StrEnum

from services.errors import LimitExceeded, ResultConflict
from services.sessions import CallStatus, PendingCall, Session, SessionState
from services.settings import ServiceSettings


class CallEventType(StrEnum):
    """The kinds of reports."""

    STARTED = "tool_call.started"
    DELTA = "tool_call.delta"
    COMPLETED = "tool_call.completed"
    FAILED = "tool_call.failed"


@dataclass(frozen=True)
class CallEvent:
    """One report. `text` is the result of a completed call, the error of a failed one, the piece of a delta."""

    type: CallEventType
    call_id: str
    text: str = ""


@dataclass(frozen=True)
class EventReceipt:
    """The durable acknowledgement of a report. `outstanding` are the calls that still wait for a result."""

    session: str
    call_id: str
    type: CallEventType
    status: CallStatus
    state: SessionState
    outstanding: tuple[str, ...]


def apply_event(session: Session, call: PendingCall, event: CallEvent, settings: ServiceSettings) -> PendingCall:
    """The call after the report; the same object when the report changes nothing.

    Raises ResultConflict when the call has another result, LimitExceeded when the text is too long.
    """
    size = len(event.text.encode())
    if event.type is CallEventType.DELTA:
        size += len(call.partial.encode())
    if size > settings.max_result_bytes:
        field, limit = ("delta" if event.type is CallEventType.DELTA else "result"), settings.max_result_bytes
        raise LimitExceeded(field, f"{size} bytes of one tool result; the limit is {limit}", limit)
    if event.type is CallEventType.STARTED:
        return call if call.started else replace(call, started=True)
    if event.type is CallEventType.DELTA:
        return _with_delta(call, event.text)
    status = CallStatus.COMPLETED if event.type is CallEventType.COMPLETED else CallStatus.FAILED
    return _with_result(session, call, status, event.text)


def _with_delta(call: PendingCall, text: str) -> PendingCall:
    if call.result is not None:
        raise ResultConflict(f"tool call {call.call.id!r} has its result already", call=call.call.id)
    return replace(call, started=True, partial=call.partial + text)


def _with_result(session: Session, call: PendingCall, status: CallStatus, result: str) -> PendingCall:
    if call.result is None:
        batch = 1 + max((other.batch for other in session.calls), default=0)
        return replace(call, started=True, status=status, result=result, batch=batch)
    if (call.status, call.result) != (status, result):
        raise ResultConflict(f"tool call {call.call.id!r} has another result already", call=call.call.id)
    return call


def receipt(session: Session, call: PendingCall, event: CallEvent, state: SessionState) -> EventReceipt:
    """The acknowledgement of a report that left the call as `call`."""
    outstanding = tuple(
        other.call.id
        for other in session.outstanding
        if (other.turn, other.position) != (call.turn, call.position) or call.status is CallStatus.PENDING
    )
    return EventReceipt(session.id, call.call.id, event.type, call.status, state, outstanding)
