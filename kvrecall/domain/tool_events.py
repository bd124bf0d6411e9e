"""Tool events that a client reports during a pause, and their effect on the call. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from kvrecall.domain.errors import InvalidRequest, LimitExceeded, ResultConflict
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import json_object
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_calls import CallStatus, PendingCall

NO_PIECES: Mapping[int, str] = MappingProxyType({})

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


def get_piece_index(call: PendingCall, event: ToolEvent) -> int:
    """Return the index of a delta's piece: after all others if it names none."""
    return call.output.next_index if event.index is None else event.index


def apply_event(
    session: Session,
    call: PendingCall,
    event: ToolEvent,
    settings: ServiceLimits,
    stored: Mapping[int, str] = NO_PIECES,
) -> PendingCall:
    """Return the call after the event; the same object when the event changes nothing.

    `stored` are pieces that the catalog has: of a delta, the one with its index, and those that
    follow if it is the first missing one. Raises ResultConflict when the call has another result or
    piece, or timed out; LimitExceeded when the text is too long or the pieces are too many;
    InvalidRequest for arguments that are no JSON object.
    """
    match event.type:
        case ToolEventType.STARTED:
            _check_size("arguments", len((event.arguments or "").encode()), settings)
            return call if is_late(call, event) else _with_start(call, event.arguments)
        case ToolEventType.DELTA:
            _check_size("delta", call.output.size + len(event.text.encode()), settings)
            return call if is_late(call, event) else _with_piece(call, event, settings, stored)
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
    call: PendingCall, event: ToolEvent, settings: ServiceLimits, stored: Mapping[int, str]
) -> PendingCall:
    at = get_piece_index(call, event)
    if at in stored:
        if stored[at] != event.text:
            raise ResultConflict(
                f"piece {at} of tool call {call.call.id!r} has another text already",
                call=call.call.id,
            )
        return call
    if call.output.pieces >= settings.max_output_pieces:
        limit = settings.max_output_pieces
        raise LimitExceeded("delta", f"{limit} pieces of one tool call's output; no more", limit)
    return _join(replace(call, started=True), at, event.text, settings, stored)


def _join(
    call: PendingCall, at: int, text: str, settings: ServiceLimits, stored: Mapping[int, str]
) -> PendingCall:
    """Return the call with one more piece, and a repair due if enough of its joined output is new."""
    output = call.output
    known = {**stored, at: text}
    joined, recent = output.joined, ""
    while joined in known:
        recent += known[joined]
        joined += 1
    characters = output.recent_characters + len(recent)
    new = output.recent_bytes + len(recent.encode())
    # Each repair observes all of the output: growth by a share bounds their work by the output's size.
    due = new >= max(settings.delta_signal_bytes, _DELTA_GROWTH * call.delta_due)
    grown = replace(
        output,
        pieces=output.pieces + 1,
        # A piece counts as at least one byte, so that the number of empty ones is bounded too.
        size=output.size + max(1, len(text.encode())),
        next_index=max(output.next_index, at + 1),
        joined=joined,
        recent_characters=0 if due else characters,
        recent_bytes=0 if due else new,
    )
    reach = call.delta_due + characters if due else call.delta_due
    return replace(call, output=grown, delta_due=reach)


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
