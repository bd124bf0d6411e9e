"""A session's turns: one of them, or all as a worker replays them, for a rebuild or a fork."""

from collections.abc import Iterable, Sequence

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.sessions.session import Turn
from kvrecall.protocol.convert import message_to_wire, rewrite_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Turns
from services.catalog.records import RepairRecord


async def get_turn(turns: Turns, session_id: str, number: int) -> Turn:
    """Return a turn that was committed. Raises UnknownSession: turns go with their session alone."""
    for turn in await turns.get_after(session_id, number - 1, 1):
        return turn
    raise UnknownSession(session_id)


def logged_turns(turns: Iterable[Turn], repairs: Sequence[RepairRecord]) -> list[pb.LoggedTurn]:
    """Convert committed turns, in order, with the positions that repairs promoted for them.

    `repairs`: the session's last repairs, the newest first.
    """
    promoted: dict[int, tuple[int, ...]] = {}
    for repair in repairs:
        # One that stopped early may have promoted nothing and left the previous rows in place.
        if repair.details.positions:
            promoted.setdefault(repair.turn, repair.details.positions)
    return [_logged(turn, promoted.get(turn.number, ())) for turn in turns]


def _logged(turn: Turn, promoted: tuple[int, ...]) -> pb.LoggedTurn:
    answer = turn.outcome.message
    rewrite = turn.outcome.rewrite
    remembered = turn.outcome.remembered
    return pb.LoggedTurn(
        token_ids=turn.token_ids,
        prompt_tokens=turn.outcome.prompt_tokens,
        output_tokens=turn.outcome.output_tokens,
        messages=[
            message_to_wire(message)
            for message in (*turn.messages, *([] if answer is None else [answer]))
        ],
        promoted=promoted,
        deferred_tokens=turn.outcome.deferred_tokens,
        recorded_tokens=turn.outcome.recorded_tokens,
        unsettled_tokens=turn.outcome.memory.unsettled,
        rewrite=None if rewrite is None else rewrite_to_wire(rewrite),
        shared_tokens=turn.outcome.shared_tokens,
        remembered_tokens=0 if remembered is None else remembered.tokens,
        remembered_behind=0 if remembered is None else remembered.behind,
    )
