"""A session's turns as a worker is told them when it has to say them again: for a rebuild, or an earlier fork."""

from collections.abc import Iterable

from kvrecall.v1 import worker_pb2 as wire
from services.messages import message_to_wire
from services.sessions import Turn


def logged_turns(turns: Iterable[Turn]) -> list[wire.LoggedTurn]:
    """The turns as they were committed, in order."""
    return [_logged(turn) for turn in turns]


def _logged(turn: Turn) -> wire.LoggedTurn:
    said = turn.outcome.message
    return wire.LoggedTurn(
        token_ids=turn.token_ids,
        prompt_tokens=turn.outcome.prompt_tokens,
        output_tokens=turn.outcome.output_tokens,
        messages=[message_to_wire(message) for message in (*turn.messages, *([] if said is None else [said]))],
    )
