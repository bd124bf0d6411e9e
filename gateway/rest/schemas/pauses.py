"""Pauses of a session: tool calls with their times, and the repairs meanwhile."""

from collections.abc import Sequence
from datetime import UTC, datetime

from gateway.rest.schemas.public import to_time
from gateway.rest.schemas.repairs import to_pause_repair
from kvrecall import client
from services.reading.pauses import Pause, PauseCall


def to_pauses(session: str, pauses: Sequence[Pause]) -> client.Pauses:
    """Convert a session's pauses."""
    return client.Pauses(session, tuple(_to_pause(pause) for pause in pauses))


def _to_pause(pause: Pause) -> client.Pause:
    return client.Pause(
        turn=pause.turn,
        began_at=datetime.fromtimestamp(pause.began_at, UTC),
        ended_at=to_time(pause.ended_at),
        open=pause.is_open,
        calls=tuple(_to_call(call, pause.began_at) for call in pause.calls),
        repairs=tuple(to_pause_repair(record) for record in pause.repairs),
    )


def _to_call(call: PauseCall, called_at: float) -> client.PauseCall:
    """Convert a call that was made at a time, in Unix seconds."""
    known = call.known
    result = None if known is None else known.result
    return client.PauseCall(
        id=call.call.id,
        name=call.call.name,
        status="unknown" if known is None else known.status.value,
        started=known is not None and known.started,
        called_at=datetime.fromtimestamp(called_at, UTC),
        started_at=None if known is None else to_time(known.output.first_event_at),
        last_event_at=None if known is None else to_time(known.last_event_at),
        ended_at=to_time(call.ended_at),
        output_pieces=0 if known is None else known.output.pieces,
        output_bytes=0 if known is None else known.output.size,
        result_bytes=None if result is None else len(result.encode()),
    )
