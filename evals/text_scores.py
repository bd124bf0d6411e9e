"""Scores of a reply's text against the expected one: F1 of words, F1 of lines, Rouge-L. All 0 to 1."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

_NOT_A_WORD = re.compile(r"[^\w\s]")
_ARTICLES = {"a", "an", "the", "and"}


def word_f1(reply: str, answer: str) -> float:
    """F1 of a reply's words, as in LoCoMo's evaluation without its stemming.

    Lower case, no punctuation and no articles.
    """
    ours = words(reply)
    theirs = words(answer)
    return _f1(sum((Counter(ours) & Counter(theirs)).values()), len(ours), len(theirs))


def lines_f1(reply: str, answers: Sequence[str], is_answer: Callable[[str, str], bool]) -> float:
    """F1 of a reply's lines against the values that it should list, whatever their order.

    A value counts once, and a line as right if it gives some value. Empty lines do not count.
    """
    lines = [line for line in reply.splitlines() if line.strip()]
    found = sum(any(is_answer(line, value) for line in lines) for value in answers)
    right = sum(any(is_answer(line, value) for value in answers) for line in lines)
    if not found:
        return 0.0
    recall, precision = found / len(answers), right / len(lines)
    return 2 * recall * precision / (recall + precision)


def rouge_l(reply: str, answer: str) -> float:
    """F1 of the longest common subsequence of words."""
    ours = words(reply)
    theirs = words(answer)
    lengths = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for index, other in enumerate(theirs, start=1):
            above = lengths[index]
            lengths[index] = before + 1 if word == other else max(above, lengths[index - 1])
            before = above
    return _f1(lengths[-1], len(ours), len(theirs))


def words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return [word for word in _NOT_A_WORD.sub(" ", text.lower()).split() if word not in _ARTICLES]


def _f1(shared: int, ours: int, theirs: int) -> float:
    return 2 * shared / (ours + theirs) if shared else 0.0
