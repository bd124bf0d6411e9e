"""Passages of a log: whole exchanges, or parts of long ones, and where they are after rewrites."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.passages import MOST_TOKENS, Passage, cut_passages, locate, split_exchanges
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.rewrites.rewrite import Edit, Rewrite, apply_edits
from kvrecall.domain.sessions.session import Turn
from kvrecall.domain.utterances import Side, Utterance


def say(*sides: Side, tokens: int = 10) -> list[Utterance]:
    """Utterances of these sides, of so many tokens each."""
    return [
        Utterance(side, f"{side} {index}", index * tokens, (index + 1) * tokens)
        for index, side in enumerate(sides)
    ]


def test_an_exchange_ends_with_its_answer_and_what_has_none_waits() -> None:
    said = say("user", "assistant", "user", "user", "assistant", "assistant", "user")
    assert split_exchanges(said) == [said[:2], said[2:6]]
    assert split_exchanges(said[:1]) == []


def test_a_short_exchange_is_one_passage_of_its_text() -> None:
    passages = cut_passages(say("user", "assistant"))
    assert passages == [Passage(0, 20, "user 0\nassistant 1")]


@given(st.integers(MOST_TOKENS // 2 + 1, 4 * MOST_TOKENS))
def test_a_long_exchange_is_cut_into_parts_of_about_the_same_size(tokens: int) -> None:
    passages = cut_passages(say("user", "assistant", tokens=tokens))
    assert passages[0].start == 0
    assert passages[-1].stop == 2 * tokens
    assert all(one.stop == other.start for one, other in pairwise(passages))
    sizes = [each.stop - each.start for each in passages]
    assert max(sizes) <= MOST_TOKENS
    assert max(sizes) - min(sizes) <= 1
    assert {each.text for each in passages} == {None}


@given(st.data())
def test_tokens_are_found_where_rewrites_have_left_them(data: Any) -> None:
    """Each turn appends some tokens, no two alike, and may drop or replace some before."""
    turns, logged, now = list[Turn](), list[int](), list[int]()
    for number in range(1, data.draw(st.integers(1, 5), "turns") + 1):
        rewrite = None
        if now and data.draw(st.booleans(), "rewrites"):
            start = data.draw(st.integers(0, len(now) - 1), "start")
            stop = data.draw(st.integers(start, len(now)), "stop")
            edit = Edit(start, stop, (-number,) * data.draw(st.integers(0, 3), "replaced by"))
            rewrite = Rewrite(0, len(now), (edit,))
            now = apply_edits(now, [edit])
        own = tuple(len(logged) + index for index in range(data.draw(st.integers(1, 6), "tokens")))
        logged += own
        now += own
        outcome = TurnOutcome(
            "s", number, None, "stop", len(own), 0, MemoryReport(64), (), {}, rewrite=rewrite
        )
        turns.append(Turn("s", number, (), own, outcome))
    start = data.draw(st.integers(0, len(logged) - 1), "first token")
    stop = data.draw(st.integers(start + 1, len(logged)), "end")
    first, last = locate(turns, start, stop)
    assert 0 <= first < last <= len(now) + 1
    if start in now:
        assert now[first] == start
    if stop - 1 in now:
        assert now[last - 1] == stop - 1
