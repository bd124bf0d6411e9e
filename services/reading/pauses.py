"""The pauses of a session: tool calls with their times, and the repairs meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.domain.errors import UnknownCall
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from services.catalog.base import Catalog
from services.catalog.records import REPAIRS_RETAINED, RepairRecord

_TURNS_AT_ONCE = 64
_OWN_TRIGGER = "turn"


@dataclass(frozen=True)
class PauseCall:
    """A tool call of a pause; `known` is None where a later call has its id."""

    call: ToolCall
    known: PendingCall | None

    @property
    def ended_at(self) -> float | None:
        """Time of the result or the timeout, in Unix seconds; None if it came within a turn."""
        known = self.known
        ended = known is not None and known.status is not CallStatus.PENDING
        if known is None or not ended:
            return None
        reported = known.started or known.status is CallStatus.TIMED_OUT
        return known.last_event_at if reported else None


@dataclass(frozen=True)
class Pause:
    """The time between a turn that ended on tool calls and the next one, in Unix seconds.

    `ended_at` is None until the next turn. `is_open`: no turn has followed yet. `repairs` are those
    that are retained, oldest first.
    """

    turn: int
    began_at: float
    ended_at: float | None
    is_open: bool
    calls: tuple[PauseCall, ...]
    repairs: tuple[RepairRecord, ...]


async def read_pauses(catalog: Catalog, session: Session, limit: int) -> list[Pause]:
    """Read the last `limit` pauses of a session, the newest first."""
    repairs = await catalog.repairs.get_latest(session.id, REPAIRS_RETAINED)
    pauses: list[Pause] = []
    following: Turn | None = None
    last = session.turns
    while last > 0 and len(pauses) < limit:
        first = max(0, last - _TURNS_AT_ONCE)
        for turn in reversed(await catalog.turns.get_after(session.id, first, last - first)):
            if turn.ending_calls and len(pauses) < limit:
                pauses.append(await _read_pause(catalog, session, turn, following, repairs))
            following = turn
        last = first
    return pauses


async def _read_pause(
    catalog: Catalog,
    session: Session,
    turn: Turn,
    following: Turn | None,
    repairs: Sequence[RepairRecord],
) -> Pause:
    calls = [
        PauseCall(call, await _find_call(catalog, session, turn.number, call))
        for call in turn.ending_calls
    ]
    return Pause(
        turn=turn.number,
        began_at=turn.outcome.committed_at,
        ended_at=None if following is None else following.outcome.started_at,
        is_open=turn.number == session.turns and bool(session.calls),
        calls=tuple(calls),
        repairs=tuple(
            record
            for record in sorted(repairs, key=lambda record: record.number)
            if record.turn == turn.number + 1 and record.report.trigger != _OWN_TRIGGER
        ),
    )


async def _find_call(
    catalog: Catalog, session: Session, turn: int, call: ToolCall
) -> PendingCall | None:
    try:
        found = await catalog.tool_calls.get(session.id, call.id)
    except UnknownCall:
        return None
    return found if found.turn == turn else None
