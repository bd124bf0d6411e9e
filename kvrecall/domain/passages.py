"""Passages of a session's log: what a memory brings back of it. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvrecall.domain.rewrites.rewrite import follow_edits
from kvrecall.domain.sessions.session import Turn
from kvrecall.domain.utterances import Utterance

# Passages that a turn sees, the nearest to its question.
PASSAGES_PER_TURN = 5
# Tokens of a passage: about what the sentence encoder reads of a text.
MOST_TOKENS = 256


@dataclass(frozen=True)
class Passage:
    """Tokens `start` .. `stop - 1` of a log, as its turns appended them, of one exchange.

    `text`: None for a part of an exchange that has more tokens than a passage may have.
    """

    start: int
    stop: int
    text: str | None


def split_exchanges(utterances: Sequence[Utterance]) -> list[list[Utterance]]:
    """Split utterances behind each answer; those behind the last answer are left out."""
    exchanges: list[list[Utterance]] = []
    open_exchange: list[Utterance] = []
    for index, each in enumerate(utterances):
        open_exchange.append(each)
        follows = index + 1 < len(utterances) and utterances[index + 1].side == "assistant"
        if each.side == "assistant" and not follows:
            exchanges.append(open_exchange)
            open_exchange = []
    return exchanges


def cut_passages(exchange: Sequence[Utterance]) -> list[Passage]:
    """Cut an exchange into passages of about the same size: one, unless it has too many tokens."""
    start, stop = exchange[0].start, exchange[-1].stop
    count = -(-(stop - start) // MOST_TOKENS)
    if count == 1:
        text = "\n".join(each.text for each in exchange if each.text)
        return [Passage(start, stop, text)]
    bounds = [start + (stop - start) * index // count for index in range(count + 1)]
    return [Passage(first, last, None) for first, last in pairwise(bounds)]


def locate(turns: Iterable[Turn], start: int, stop: int) -> tuple[int, int]:
    """Find where tokens start .. stop-1 of a log, as its turns appended them, are in the session now.

    The chat template may have dropped or rewritten tokens since (`TurnOutcome.rewrite`).
    """
    logged = length = 0
    found = {start: start, stop - 1: stop - 1}
    for turn in turns:
        rewrite = turn.outcome.rewrite
        if rewrite is not None:
            before = {each: at for each, at in found.items() if each < logged}
            found |= {each: follow_edits(at, rewrite.edits) for each, at in before.items()}
            length -= rewrite.dropped_tokens
        own = range(logged, logged + len(turn.token_ids))
        found |= {each: length + each - logged for each in found if each in own}
        logged, length = own.stop, length + len(own)
    return found[start], max(found[start], found[stop - 1]) + 1
