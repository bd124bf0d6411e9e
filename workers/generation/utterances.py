"""Who said how many of a turn's tokens: what clustering a conversation by topic goes by."""

from collections.abc import Sequence
from itertools import groupby

from workers.model.tokenizer import Segment


def utterance_tokens(
    roles: Sequence[str], segments: Sequence[Segment], answer: int | None
) -> list[int]:
    """Tokens of each run of messages of one side, the assistant's or all others', then of the answer, if there is one.

    roles: of the turn's messages in their order; segments: these messages, as `ChatTokenizer.prompt` renders them;
    answer: how many tokens were generated. What opens an assistant's message counts with the messages before it, or
    with the assistant's own where none of the others' precede it. Together the counts are all of the turn's tokens.
    """
    left = list(segments)
    counts = []
    for of_assistant, run in groupby(roles, key=lambda role: role == "assistant"):
        if of_assistant:
            counts.append(sum(_take_recorded(left) for _ in run))
        else:
            counts.append(_take(left, recorded=False))
    if answer is None:
        return counts
    return [*counts, _take(left, recorded=False) + answer]


def _take_recorded(left: list[Segment]) -> int:
    return _take(left, recorded=False) + _take(left, recorded=True)


def _take(left: list[Segment], *, recorded: bool) -> int:
    if not left or left[0].recorded != recorded:
        return 0
    return len(left.pop(0).token_ids)
