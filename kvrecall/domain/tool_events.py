"""Tool events that a client reports during a pause, and their effect on the call. Pure."""

from dataclasses import dataclass, replace
from enum import StrEnum

from kvrecall.domain.errors import InvalidRequest, LimitExceeded, ResultConflict
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import json_object
from kvrecall.domain.session import Session
from kvrecall.domain.state_machine import SessionState
from kvrecall.domain.tool_calls import CallStatus, PendingCall

# Share of the output before that new output must reach, for a repair to be due on it.
_DELTA_GROWTH = 0.25


class ToolEventType(StrEnum):
    """The kinds of reports."""

    STARTED = "tool_call.started"
    DELTA = "tool_call.delta"
    COMPLETED = "tool_call.completed"
    FAILED = "tool_call.failed"


@dataclass(frozen=True)
class ToolEvent:
    """One report.

    `text` is the result of a completed call, the error of a failed one, the piece of a delta.

    A started call may name the `arguments` (JSON text of an object) that the client really runs. A
    delta may have an `index`, from 0: pieces come in any order then, and each one counts once.
    """

    type: ToolEventType
    call_id: str
    text: str = ""
    arguments: str | None = None
    index: int | None = None


@dataclass(frozen=True)
class EventReceipt:
    """The durable acknowledgement of a report.

    `outstanding` are the calls that still wait for a result.

    A report is `late` when there was nothing left for it to change: a piece of output after the
    result, or a result that the conversation has already.
    """

    session: str
    call_id: str
    type: ToolEventType
    status: CallStatus
    state: SessionState
    outstanding: tuple[str, ...]
    late: bool = False


def is_late(call: PendingCall, event: ToolEvent) -> bool:
    """Return whether the call is past the event. A conflicting result is refused all the same."""
    if event.type in (ToolEventType.STARTED, ToolEventType.DELTA):
        return call.result is not None
    return call.consumed_in_turn is not None


def apply_event(
    session: Session, call: PendingCall, event: ToolEvent, settings: ServiceLimits
) -> PendingCall:
    """Return the call after the event; the same object when the event changes nothing.

    Raises ResultConflict when the call has another result or piece, or timed out; LimitExceeded
    when the text is too long; InvalidRequest for arguments that are no JSON object.
    """
    match event.type:
        case ToolEventType.STARTED:
            _check_size("arguments", len((event.arguments or "").encode()), settings)
            return call if is_late(call, event) else _with_start(call, event.arguments)
        case ToolEventType.DELTA:
            # A piece counts as at least one byte, so that the number of empty ones is bounded too.
            held = sum(max(1, len(piece.encode())) for piece in call.pieces.values())
            _check_size("delta", held + len(event.text.encode()), settings)
            return (
                call
                if is_late(call, event)
                else _with_piece(call, event.index, event.text, settings)
            )
        case ToolEventType.COMPLETED | ToolEventType.FAILED:
            _check_size("result", len(event.text.encode()), settings)
            completed = event.type is ToolEventType.COMPLETED
            return _with_result(
                session, call, CallStatus.COMPLETED if completed else CallStatus.FAILED, event.text
            )


def timed_out(call: PendingCall, seconds: float) -> PendingCall:
    """Time the call out: the model reads that as its result. No repair is conditioned on it."""
    text = f"no result: this tool call timed out after {seconds:g} seconds without an event"
    return replace(call, status=CallStatus.TIMED_OUT, result=text)


def _check_size(field: str, size: int, settings: ServiceLimits) -> None:
    if size > settings.max_result_bytes:
        limit = settings.max_result_bytes
        raise LimitExceeded(
            field, f"{size} bytes of one tool call's {field}; the limit is {limit}", limit
        )


def _with_start(call: PendingCall, arguments: str | None) -> PendingCall:
    started = call if call.started else replace(call, started=True)
    if arguments is None:
        return started
    reported = json_object(arguments)
    if reported is None:
        raise InvalidRequest(
            "arguments", "the arguments of a tool call are the JSON text of an object"
        )
    return (
        started
        if reported == json_object(call.running.arguments)
        else replace(started, arguments=arguments)
    )


def _with_piece(
    call: PendingCall, index: int | None, text: str, settings: ServiceLimits
) -> PendingCall:
    at = 1 + max(call.pieces, default=-1) if index is None else index
    if at in call.pieces:
        if call.pieces[at] != text:
            raise ResultConflict(
                f"piece {at} of tool call {call.call.id!r} has another text already",
                call=call.call.id,
            )
        return call
    changed = replace(call, started=True, pieces={**call.pieces, at: text})
    whole = changed.partial
    new = len(whole[call.delta_due :].encode())
    # Each repair observes all of the output: growth by a share bounds their work by the output's size.
    due = new >= max(settings.delta_signal_bytes, _DELTA_GROWTH * call.delta_due)
    return replace(changed, delta_due=len(whole)) if due else changed


def _with_result(
    session: Session, call: PendingCall, status: CallStatus, result: str
) -> PendingCall:
    if call.result is None:
        batch = 1 + max((other.batch for other in session.calls), default=0)
        return replace(call, started=True, status=status, result=result, batch=batch)
    if call.status is CallStatus.TIMED_OUT:
        message = f"tool call {call.call.id!r} timed out before this result came; the model is told that it failed"
        raise ResultConflict(message, call=call.call.id)
    if (call.status, call.result) != (status, result):
        raise ResultConflict(
            f"tool call {call.call.id!r} has another result already", call=call.call.id
        )
    return call


def receipt(
    session: Session, call: PendingCall, event: ToolEvent, state: SessionState, late: bool = False
) -> EventReceipt:
    """The acknowledgement of a report that left the call as `call`."""
    outstanding = tuple(
        other.call.id
        for other in session.outstanding
        if (other.turn, other.position) != (call.turn, call.position)
        or call.status is CallStatus.PENDING
    )
    return EventReceipt(session.id, call.call.id, event.type, call.status, state, outstanding, late)
