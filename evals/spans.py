"""Where words stand in what was said: token positions of text."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from workers.model.tokenizer import ChatTokenizer


def spans_of(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], wanted: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """The positions of the tokens that the first occurrence of each text touches, by the texts' keys.

    For tokenizers whose tokens are pieces of the text, as byte-level BPE is. Raises KeyError for a text that is not
    there.
    """
    text, starts = laid_out(tokenizer, token_ids)
    return {key: touched(starts, text.find(words), words) for key, words in wanted.items()}


def laid_out(tokenizer: ChatTokenizer, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of tokens, and where in it each of them begins."""
    known = {token: tokenizer.decode([token]) for token in set(token_ids)}
    pieces = [known[token] for token in token_ids]
    return "".join(pieces), list(accumulate((len(piece) for piece in pieces), initial=0))[:-1]


def touched(starts: Sequence[int], at: int, words: str) -> tuple[int, ...]:
    """The tokens that the text `words` touches, which begins at character `at`. Raises KeyError for a negative one."""
    if at < 0:
        raise KeyError(f"{words!r} was not said")
    return tuple(range(bisect_right(starts, at) - 1, bisect_left(starts, at + len(words))))
