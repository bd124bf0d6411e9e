"""Counts a turn's tokens by speaker: the utterances that episodes are clustered from."""

from collections.abc import Sequence
from itertools import groupby

from workers.model.tokenizer import Segment


def utterance_tokens(
    roles: Sequence[str], segments: Sequence[Segment], answer: int | None
) -> list[int]:
    """Count the tokens of each run of messages of one side, the assistant's or all others'.

    roles: of the turn's messages in their order; segments: these messages, as
    `ChatTokenizer.prompt` renders them; answer: the number of generated tokens, None without
    generation; its count comes last. The tokens that open an assistant's message count with the
    messages before it, or with the assistant's own where no other message precedes it. The counts
    add up to all of the turn's tokens.
    """
    remaining = list(segments)
    counts = []
    for is_assistant, run in groupby(roles, key=lambda role: role == "assistant"):
        if is_assistant:
            counts.append(sum(_pop_recorded(remaining) for _ in run))
        else:
            counts.append(_pop(remaining, recorded=False))
    if answer is None:
        return counts
    return [*counts, _pop(remaining, recorded=False) + answer]


def _pop_recorded(remaining: list[Segment]) -> int:
    return _pop(remaining, recorded=False) + _pop(remaining, recorded=True)


def _pop(remaining: list[Segment], *, recorded: bool) -> int:
    if not remaining or remaining[0].recorded != recorded:
        return 0
    return len(remaining.pop(0).token_ids)
