"""Scores of texts: words, lines, and the longest common subsequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.languages.base import contains_value
from evals.text_scores import lines_f1, rouge_l, word_f1

TEXTS = st.text("ab .", max_size=12)


def test_words_count_without_case_articles_and_punctuation() -> None:
    assert word_f1("The Cherry tomatoes!", "cherry tomatoes") == 1
    assert word_f1("cherry", "cherry tomatoes") == pytest.approx(2 / 3)
    assert word_f1("roses", "cherry tomatoes") == 0


def test_lines_count_by_the_values_they_give_in_any_order() -> None:
    values = ("Oakton", "Elmford")
    assert lines_f1("Boris: Elmford\n\nAnna: Oakton\n", values, contains_value) == 1
    assert lines_f1("Anna: Oakton", values, contains_value) == pytest.approx(2 / 3)
    assert lines_f1("Oakton\nOakton\nParis", values, contains_value) == pytest.approx(
        2 * 0.5 * (2 / 3) / (0.5 + 2 / 3)
    )
    assert lines_f1("Paris", values, contains_value) == 0


def test_rouge_l_counts_words_in_their_order() -> None:
    assert rouge_l("one two three", "one two three") == 1
    assert rouge_l("three two one", "one two three") == pytest.approx(1 / 3)
    assert rouge_l("one x two", "one two") == pytest.approx(2 * 2 / (3 + 2))


@given(TEXTS, TEXTS)
def test_rouge_l_is_symmetric_and_at_most_the_f1_of_words(ours: str, theirs: str) -> None:
    assert rouge_l(ours, theirs) == rouge_l(theirs, ours) <= word_f1(ours, theirs) + 1e-12
