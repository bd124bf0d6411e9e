"""The end of a session's log, for a worker that may have to say it otherwise (`pb.Earlier`).

Most chat templates drop the reasoning of answers once a user's message follows them.
"""

from collections.abc import Sequence

from kvrecall.domain.messages import Message
from kvrecall.domain.rewrites.rewrite import apply_edits
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.convert import message_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Catalog

_TURNS_AT_ONCE = 8
# Tokens before the messages among which a recurrent state is likely to be stored.
_STATE_TOKENS = 4096


async def read_log_end(
    catalog: Catalog, session: Session, messages: Sequence[Message], info: WorkerInfo
) -> pb.Earlier | None:
    """Read what a turn of these messages may rewrite; None if it rewrites nothing.

    That is so for a model whose template never rewrites, for messages without a user's, for a session
    that keeps reasoning, and for one with episodes, whose segments are stored by their positions.
    """
    settings = session.settings
    asks = any(message.role == "user" for message in messages)
    if not (info.rewrites and asks and session.turns):
        return None
    if settings.keep_reasoning or settings.episodes is not None:
        return None
    wanted = _STATE_TOKENS if info.has_states else info.page_tokens
    turns = list[Turn]()
    found: pb.Earlier | None = None
    while found is None and (first := session.turns - len(turns)) > 0:
        after = max(0, first - _TURNS_AT_ONCE)
        turns = [*await catalog.turns.get_after(session.id, after, first - after), *turns]
        found = _join_end(turns, wanted, whole=after == 0)
    return found


def _join_end(turns: Sequence[Turn], wanted: int, *, whole: bool) -> pb.Earlier | None:
    """Join the messages since the user's last one, and the tokens of these turns.

    None if the turns do not reach back far enough: `wanted` tokens before the turn of that message,
    unless they are the `whole` log.
    """
    said = [message for turn in turns for message in _get_messages(turn)]
    users = [index for index, message in enumerate(said) if message.role == "user"]
    if not users:
        return pb.Earlier() if whole else None
    start = turns[0].outcome.stop - len(turns[0].token_ids)
    tokens = list[int]()
    for turn in turns:
        rewrite = turn.outcome.rewrite
        if rewrite is not None and turn is not turns[0]:
            if rewrite.edits[0].start < start:
                return None
            tokens = apply_edits(tokens, rewrite.edits, start)
        tokens += turn.token_ids
    asked = max(i for i, turn in enumerate(turns) if any(m.role == "user" for m in turn.messages))
    before = sum(len(turn.token_ids) for turn in turns[:asked])
    if before < wanted and not whole:
        return None
    wire = [message_to_wire(message) for message in said[users[-1] :]]
    return pb.Earlier(messages=wire, token_ids=tokens)


def _get_messages(turn: Turn) -> tuple[Message, ...]:
    answer = turn.outcome.message
    return turn.messages if answer is None else (*turn.messages, answer)
