"""An answer that is said again is told from where it broke off, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import ToolCall
from services.stream_resume import StreamResumer

CALL = ToolCall("call_1_0", "weather", '{"city": "Bern"}')


@given(st.lists(st.text(min_size=1, max_size=4), max_size=8), st.integers(0, 8), st.data())
def test_the_reader_hears_every_answer_once_however_it_is_cut(
    pieces: list[str], heard: int, data: st.DataObject
) -> None:
    told = ""
    retelling = StreamResumer()
    answer = "".join(pieces)
    retelling.begin()
    for piece in pieces[:heard]:
        told += retelling.text(piece) or ""
    retelling.begin()
    rest = answer
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        told += retelling.text(rest[:size]) or ""
        rest = rest[size:]
    retelling.end()
    assert told == answer


def test_another_answer_is_not_told() -> None:
    retelling = StreamResumer()
    retelling.begin()
    retelling.text("one two")
    retelling.begin()
    assert retelling.text("one ") is None
    with pytest.raises(WorkerLost, match="answered otherwise"):
        retelling.text("three")
    assert retelling.differs


def test_an_answer_that_ends_before_what_was_told_is_another_one() -> None:
    retelling = StreamResumer()
    retelling.begin()
    retelling.text("one two")
    retelling.begin()
    retelling.text("one")
    with pytest.raises(WorkerLost):
        retelling.end()


def test_calls_are_told_once_and_must_be_the_same() -> None:
    retelling = StreamResumer()
    retelling.begin()
    assert retelling.call(CALL)
    retelling.begin()
    assert not retelling.call(CALL)
    retelling.end()
    retelling.begin()
    with pytest.raises(WorkerLost):
        retelling.call(ToolCall("call_1_0", "weather", '{"city": "Rome"}'))


def test_calls_that_are_not_made_again_were_another_answer() -> None:
    retelling = StreamResumer()
    retelling.begin()
    retelling.call(CALL)
    retelling.begin()
    with pytest.raises(WorkerLost):
        retelling.end()
