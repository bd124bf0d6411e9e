"""Edits of a log's tokens."""

from kvrecall.domain.rewrites.rewrite import Edit, Rewrite, apply_edits, follow_edits

EDITS = (Edit(12, 14), Edit(15, 16, (1, 2)))


def test_edits_are_applied_at_the_places_of_the_tokens_before() -> None:
    assert apply_edits(range(10, 20), EDITS, 10) == [10, 11, 14, 1, 2, 16, 17, 18, 19]


def test_a_token_is_followed_to_where_the_edits_have_left_it() -> None:
    assert [follow_edits(at, EDITS) for at in (10, 11, 14, 16, 19)] == [10, 11, 12, 15, 18]
    # One that was dropped is where the next one is; one that was replaced, at its replacement.
    assert follow_edits(13, EDITS) == 12
    assert follow_edits(15, EDITS) == 13


def test_a_rewrite_counts_what_is_gone() -> None:
    assert Rewrite(0, 64, EDITS).dropped_tokens == 1
