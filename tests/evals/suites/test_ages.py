"""Facts by age: each is stated once, where its age is to be."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from evals.configs import parse_config
from evals.harness import Setup
from evals.languages.english import ENGLISH
from evals.suites import ages
from evals.suites.ages import Ages, Corrected, build_conversation, keep_order
from kvrecall.domain.settings.session import EpisodeSettings
from workers.positions.chunks import Chunks

SETUP = Setup("model", parse_config("icecache"), "256", 7, 256, EpisodeSettings())
WINDOW = 1000

MakeSetup = Callable[..., Setup]


def count_words(messages: Sequence[Any]) -> int:
    return sum(len(message["content"].split()) for message in messages)


@pytest.mark.parametrize("corrected", ["marked", "unmarked"])
def test_half_as_many_facts_get_a_new_value_behind_their_statement(corrected: Corrected) -> None:
    messages, planted = build_conversation(
        Ages(SETUP, 4000, 8, corrected=corrected), ENGLISH, count_words, WINDOW
    )
    assert len(planted) == 4
    texts = [message["content"] for message in messages]
    for each in planted:
        assert each.before is not None
        assert each.before.before is None
        assert each.before.place < each.place
        assert each.before.fact.value in texts[each.before.place]
        assert each.before.fact.value != each.fact.value
        assert each.fact.value in texts[each.place]
        marked = any(word in texts[each.place] for word in ("Correction", "changed", "wrong"))
        assert marked == (corrected == "marked")


def test_two_old_statements_are_seen_by_their_places_in_chunks(make_setup: MakeSetup) -> None:
    setup = make_setup('icecache{"share":0.25}', "96", block_tokens=64)
    # The window is 16,384 tokens: within it both are seen where they are.
    suite = ages.suite(setup, [setup.config], 1, [300], facts=4, corrected="marked")
    records = [record for unit in suite.units for record in suite.run(unit)]
    assert [each["in_order"] for each in records] == [True, True]
    rows = [row for row in suite.rows(records) if "mean" in row]
    assert [row["condition"] for row in rows] == [
        "300 tokens, new value marked, both statements seen in their order"
    ]
    # A chunk has 100 tokens: the second statement is seen before the first if it is earlier in its chunk.
    chunks = Chunks(300, 100)
    assert keep_order(chunks, 900, 310, 420)
    assert not keep_order(chunks, 900, 320, 410)
    assert keep_order(chunks, 900, 710, 805)


def build(unit: Ages) -> tuple[list[int], int]:
    """Ages of all facts, in order, and the conversation's length."""
    messages, planted = build_conversation(unit, ENGLISH, count_words, WINDOW)
    length = count_words(messages)
    for each in planted:
        assert each.fact.value in messages[each.place]["content"]
    return [length - count_words(messages[: each.place]) for each in planted], length


def test_facts_lie_at_all_places() -> None:
    found, length = build(Ages(SETUP, 4000, 8))
    assert 4000 <= length < 4100
    assert [age * 8 // length for age in found] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_facts_lie_at_the_ages_that_are_named() -> None:
    found, length = build(Ages(SETUP, 4000, 7, ages=(0.5, 2.5)))
    assert 4000 <= length < 4100
    assert len(found) == 7
    assert all(2200 < age < 2850 for age in found[:4])
    assert all(200 < age < 850 for age in found[4:])


def test_ages_that_do_not_fit_are_refused() -> None:
    for wanted in ((0.5, 0.7), (9.0,)):
        with pytest.raises(ValueError, match="do not fit half a window of 1000 each"):
            build(Ages(SETUP, 4000, 4, ages=wanted))
