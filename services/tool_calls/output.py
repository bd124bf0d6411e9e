"""Partial output of tool calls, read from the catalog: no more of it than an event or repair needs."""

from collections.abc import Mapping

from kvrecall.domain.repairs import SIGNAL_CHARACTERS, DueRepair
from kvrecall.domain.session import Session
from kvrecall.domain.tool_calls import PendingCall
from kvrecall.domain.tool_events import NO_PIECES, ToolEvent, ToolEventType, get_piece_index
from services.catalog.base import Catalog

_PIECES_AT_ONCE = 64


async def read_stored_pieces(
    catalog: Catalog, session_id: str, call: PendingCall, event: ToolEvent
) -> Mapping[int, str]:
    """Read the pieces that `apply_event` compares a delta with, or joins with it."""
    at = get_piece_index(call, event)
    if event.type is not ToolEventType.DELTA or at >= call.output.next_index:
        return NO_PIECES
    if at != call.output.joined:
        return dict(enumerate(await catalog.tool_calls.get_pieces(session_id, call, at, 1), at))
    following: list[str] = []
    while True:
        first = at + 1 + len(following)
        some = await catalog.tool_calls.get_pieces(session_id, call, first, _PIECES_AT_ONCE)
        following += some
        if len(some) < _PIECES_AT_ONCE:
            return dict(enumerate(following, at + 1))


async def read_signal(catalog: Catalog, session: Session, repair: DueRepair) -> str:
    """Read the output that a repair is conditioned on: its end, of at most SIGNAL_CHARACTERS."""
    planned = next(call for call in session.calls if call.position == repair.position)
    call = await catalog.tool_calls.get(session.id, planned.call.id)
    # Characters of the joined pieces that the repair does not take into account.
    after = call.delta_due + call.output.recent_characters - repair.reach
    text, first = "", call.output.joined
    while first and len(text) < after + SIGNAL_CHARACTERS:
        count = min(first, _PIECES_AT_ONCE)
        first -= count
        text = "".join(await catalog.tool_calls.get_pieces(session.id, call, first, count)) + text
    return text[: len(text) - after][-SIGNAL_CHARACTERS:]
