"""Pauses of a session: tool calls with their times, and the repairs meanwhile."""

from collections.abc import Sequence
from datetime import UTC, datetime

from gateway.rest.schemas.base import View
from gateway.rest.schemas.log import to_time
from gateway.rest.schemas.repairs import RepairRecordView
from services.reading.pauses import Pause, PauseCall


class PauseCallView(View):
    """Tool call of a pause.

    `called_at` is the commit of the turn that made it, `started_at` the client's first event of it,
    `ended_at` its result or timeout; null where that was not stored or has not come. `status` is
    unknown where a later call of the session has the same id.
    """

    id: str
    name: str
    status: str
    started: bool
    called_at: datetime
    started_at: datetime | None
    last_event_at: datetime | None
    ended_at: datetime | None
    output_pieces: int
    output_bytes: int
    result_bytes: int | None

    @classmethod
    def from_domain(cls, call: PauseCall, called_at: float) -> "PauseCallView":
        """Convert from a call that was made at a time, in Unix seconds."""
        known = call.known
        result = None if known is None else known.result
        return cls(
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


class PauseView(View):
    """Pause after a turn: its tool calls, and the retained repairs, oldest first.

    It began with the commit of `turn` and ended when the next one was asked for; null until
    then.
    """

    turn: int
    began_at: datetime
    ended_at: datetime | None
    open: bool
    calls: list[PauseCallView]
    repairs: list[RepairRecordView]

    @classmethod
    def from_domain(cls, pause: Pause) -> "PauseView":
        """Convert from the domain value."""
        return cls(
            turn=pause.turn,
            began_at=datetime.fromtimestamp(pause.began_at, UTC),
            ended_at=to_time(pause.ended_at),
            open=pause.is_open,
            calls=[PauseCallView.from_domain(call, pause.began_at) for call in pause.calls],
            repairs=[RepairRecordView.from_record(record) for record in pause.repairs],
        )


class PausesView(View):
    """Last pauses of a session, newest first."""

    session: str
    pauses: list[PauseView]

    @classmethod
    def from_domain(cls, session: str, pauses: Sequence[Pause]) -> "PausesView":
        """Convert from a session's pauses."""
        return cls(session=session, pauses=[PauseView.from_domain(pause) for pause in pauses])
