"""The tokens of a session, from its turns: what each appended, and rewrote before."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvrecall.domain.rewrites.rewrite import apply_edits
from kvrecall.domain.sessions.session import Turn


def join_tokens(turns: Iterable[Turn]) -> list[int]:
    """Join the tokens that a session has at the end of these turns, its first ones."""
    tokens = list[int]()
    for turn in turns:
        if turn.outcome.rewrite is not None:
            tokens = apply_edits(tokens, turn.outcome.rewrite.edits)
        tokens += turn.token_ids
    return tokens


def count_tokens(turns: Iterable[Turn]) -> int:
    """Count the tokens that a session has at the end of these turns, its first ones."""
    count = 0
    for turn in turns:
        rewrite = turn.outcome.rewrite
        count += len(turn.token_ids) - (0 if rewrite is None else rewrite.dropped_tokens)
    return count


def restate_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return a session's turns with the tokens that are left of each, at the places that these have now.

    What was put in the place of other tokens belongs to the turn of the first of these.
    """
    tokens = list[tuple[int, int, int]]()  # the token, its turn, its utterance
    for index, turn in enumerate(turns):
        rewrite = turn.outcome.rewrite
        for edit in reversed(() if rewrite is None else rewrite.edits):
            _, owner, side = tokens[edit.start]
            tokens[edit.start : edit.stop] = [(token, owner, side) for token in edit.token_ids]
        counts = turn.utterance_tokens or (len(turn.token_ids),)
        sides = [side for side, count in enumerate(counts) for _ in range(count)]
        tokens += zip(turn.token_ids, [index] * len(sides), sides, strict=True)
    return [_restate(turn, tokens, index) for index, turn in enumerate(turns)]


def _restate(turn: Turn, tokens: Sequence[tuple[int, int, int]], index: int) -> Turn:
    places = [place for place, (_, owner, _) in enumerate(tokens) if owner == index]
    sides = Counter(tokens[place][2] for place in places)
    return replace(
        turn,
        token_ids=tuple(tokens[place][0] for place in places),
        utterance_tokens=tuple(sides[side] for side in range(len(turn.utterance_tokens))),
        outcome=replace(turn.outcome, stop=places[-1] + 1 if places else 0),
    )
