"""Token positions of text in a conversation's tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from workers.model.tokenizer import ChatTokenizer


def find_spans(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], texts: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """Positions of the tokens that overlap the first occurrence of each text, by the texts' keys.

    For tokenizers whose tokens are pieces of the text, such as byte-level BPE. Raises KeyError for
    a text that does not occur.
    """
    decoded, starts = decode_with_offsets(tokenizer, token_ids)
    return {key: overlapping(starts, decoded.find(text), text) for key, text in texts.items()}


def decode_with_offsets(
    tokenizer: ChatTokenizer, token_ids: Sequence[int]
) -> tuple[str, list[int]]:
    """Text of tokens, and the character offset at which each of them begins."""
    known = {token: tokenizer.decode([token]) for token in set(token_ids)}
    pieces = [known[token] for token in token_ids]
    return "".join(pieces), list(accumulate((len(piece) for piece in pieces), initial=0))[:-1]


def overlapping(starts: Sequence[int], offset: int, text: str) -> tuple[int, ...]:
    """Positions of the tokens that overlap `text`, which begins at character `offset`.

    `starts` are the tokens' character offsets. Raises KeyError for a negative offset.
    """
    if offset < 0:
        raise KeyError(f"{text!r} does not occur in the conversation")
    return tuple(range(bisect_right(starts, offset) - 1, bisect_left(starts, offset + len(text))))
