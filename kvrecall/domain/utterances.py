"""A session's log as utterances: consecutive text of one side, with its tokens. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Literal

from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.session import Turn

Side = Literal["user", "assistant"]


@dataclass(frozen=True)
class Utterance:
    """Consecutive text of one side, as tokens `start` .. `stop - 1` of the session.

    Tool results and system messages are on the user's side. `turn` and `index` locate it in the
    log: the index-th utterance (from 0) of that turn. An utterance never continues in the next
    turn, so it never changes.
    """

    side: Side
    text: str
    start: int
    stop: int
    turn: int = 0
    index: int = 0


def utterances(turns: Iterable[Turn], start: int = 0) -> list[Utterance]:
    """The utterances of consecutive turns, the first of which begins at token `start`."""
    found: list[Utterance] = []
    for turn in turns:
        found += _of_turn(turn, start)
        start += len(turn.token_ids)
    return found


def side_of_message(message: Message) -> Side:
    """The side a message is on."""
    return "assistant" if message.role == "assistant" else "user"


def join_text(messages: Iterable[Message]) -> str:
    """Join the text of messages and the tools they call.

    Without system messages, which reveal no topic.
    """
    parts = [part for message in messages if message.role != "system" for part in _parts(message)]
    return "\n".join(part for part in parts if part)


def query_text(messages: Sequence[Message]) -> str:
    """Return a turn's text up to the user side's last message, which identifies its episode.

    The messages before a question often reveal more of its topic than the question; a recorded
    reply after it is an answer.
    """
    asked = [index for index, message in enumerate(messages) if side_of_message(message) == "user"]
    return join_text(messages[: asked[-1] + 1]) if asked else ""


def _parts(message: Message) -> list[str]:
    return [message.content, *(call.signal for call in message.tool_calls)]


def _of_turn(turn: Turn, start: int) -> list[Utterance]:
    runs = [(side, join_text(run)) for side, run in groupby(turn.messages, side_of_message)]
    if turn.outcome.message is not None:
        runs.append(("assistant", join_text([turn.outcome.message])))
    counts: Sequence[int] = turn.utterance_tokens
    if len(counts) != len(runs) or sum(counts) != len(turn.token_ids):
        # The worker splits the sides in the same way; if it does not, the turn counts as one
        # utterance.
        runs = [("user", "\n".join(text for _, text in runs))]
        counts = [len(turn.token_ids)]
    ends = accumulate(counts, initial=start)
    return [
        Utterance(side, text, first, stop, turn.number, index)
        for index, ((side, text), (first, stop)) in enumerate(
            zip(runs, pairwise(ends), strict=True)
        )
    ]
