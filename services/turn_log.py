"""A session's turns as a worker is told them when it has to say them again: for a rebuild, or an earlier fork."""

from collections.abc import Iterable, Sequence

from kvrecall.domain.session import Turn
from kvrecall.protocol.convert import message_to_wire
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.catalog.records import RepairRecord


def logged_turns(turns: Iterable[Turn], repairs: Sequence[RepairRecord]) -> list[wire.LoggedTurn]:
    """The turns as they were committed, in order, with what the session's `repairs` brought back for them.

    `repairs`: those that are remembered, the newest first.
    """
    promoted: dict[int, tuple[int, ...]] = {}
    for repair in repairs:
        if (
            repair.details.positions
        ):  # one that was cut early may have left what was there before it
            promoted.setdefault(repair.turn, repair.details.positions)
    return [_logged(turn, promoted.get(turn.number, ())) for turn in turns]


def _logged(turn: Turn, promoted: tuple[int, ...]) -> wire.LoggedTurn:
    said = turn.outcome.message
    return wire.LoggedTurn(
        token_ids=turn.token_ids,
        prompt_tokens=turn.outcome.prompt_tokens,
        output_tokens=turn.outcome.output_tokens,
        messages=[
            message_to_wire(message)
            for message in (*turn.messages, *([] if said is None else [said]))
        ],
        promoted=promoted,
    )
