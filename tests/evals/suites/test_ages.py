"""Facts by age: each is stated once, where its age is to be."""

from collections.abc import Sequence
from typing import Any

import pytest

from evals.configs import parse_config
from evals.harness import Setup
from evals.languages.english import ENGLISH
from evals.suites.ages import Ages, build_conversation
from kvrecall.domain.settings.session import EpisodeSettings

SETUP = Setup("model", parse_config("icecache"), "256", 7, 256, EpisodeSettings())
WINDOW = 1000


def count_words(messages: Sequence[Any]) -> int:
    return sum(len(message["content"].split()) for message in messages)


def build(unit: Ages) -> tuple[list[int], int]:
    """Ages of all facts, in order, and the conversation's length."""
    messages, planted = build_conversation(unit, ENGLISH, count_words, WINDOW)
    length = count_words(messages)
    for each in planted:
        assert each.fact.value in messages[each.place]["content"]
    return [length - count_words(messages[: each.place]) for each in planted], length


def test_facts_lie_at_all_places() -> None:
    ages, length = build(Ages(SETUP, 4000, 8))
    assert 4000 <= length < 4100
    assert [age * 8 // length for age in ages] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_facts_lie_at_the_ages_that_are_named() -> None:
    ages, length = build(Ages(SETUP, 4000, 7, ages=(0.5, 2.5)))
    assert 4000 <= length < 4100
    assert len(ages) == 7
    assert all(2200 < age < 2850 for age in ages[:4])
    assert all(200 < age < 850 for age in ages[4:])


def test_ages_that_do_not_fit_are_refused() -> None:
    for ages in ((0.5, 0.7), (9.0,)):
        with pytest.raises(ValueError, match="do not fit half a window of 1000 each"):
            build(Ages(SETUP, 4000, 4, ages=ages))
