"""Long results of tools: records and notes, with the answer's field somewhere between them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from reference.chat import FEELINGS, REPLY_LINES, TIMES, TOPICS, USER_LINES, draw_line
from reference.forms import LOG_FIELDS, LOG_LINES


def long_result(
    rng: random.Random, answer: Mapping[str, str], n_tokens: float, others: Sequence[str]
) -> dict[str, str]:
    """A result of about `n_tokens` tokens with the fields of `answer` before, between or after others.

    Lines of it may name `others`, who are not the answer.
    """
    n_fields = rng.randint(1, 3)
    shares = [rng.random() + 0.1 for _ in range(n_fields)]
    total = sum(shares)
    filled = [
        (name, _text(rng, n_tokens * share / total, others))
        for name, share in zip(rng.sample(LOG_FIELDS, n_fields), shares, strict=True)
    ]
    at = rng.randint(0, n_fields)
    return dict([*filled[:at], *answer.items(), *filled[at:]])


def _text(rng: random.Random, n_tokens: float, others: Sequence[str]) -> str:
    """Lines of one kind: a word again and again, records, or sentences."""
    # With the characters of a token of the shipped tokenizer.
    draw_one, chars_per_token = rng.choice(((_same, 1.2), (_record, 1.9), (_sentence, 3.2)))
    topic = rng.choice(sorted(TOPICS))
    lines: list[str] = []
    while sum(len(line) + 2 for line in lines) < n_tokens * chars_per_token:
        line = draw_one(rng, topic)
        if others and rng.random() < 0.1:
            line = f"{rng.choice(others)} called {rng.choice(TIMES)}"
        lines.append(line)
    separator = " " if draw_one is _sentence else ", "
    return separator.join(lines)


def _same(rng: random.Random, topic: str) -> str:
    return LOG_LINES[0]


def _record(rng: random.Random, topic: str) -> str:
    return rng.choice(LOG_LINES).format(
        number=f"{rng.randrange(1000):03d}", time=rng.choice(TIMES), feeling=rng.choice(FEELINGS)
    )


def _sentence(rng: random.Random, topic: str) -> str:
    return draw_line(rng, rng.choice((USER_LINES, REPLY_LINES)), topic)
