"""A turn follows the answer before it without a second token of its beginning."""

from workers.generation.rendering import join_turns
from workers.model.tokenizer import Segment

USER, TOOL, END = 1, 2, 3
TURN = [Segment((USER, 10, 11), recorded=False), Segment((12,), recorded=True)]


def test_a_turn_that_an_answer_has_begun_is_not_begun_again() -> None:
    joined = join_turns([7, USER], TURN, (END, USER, TOOL))
    assert [segment.token_ids for segment in joined] == [(10, 11), (12,)]
    alone = [Segment((USER,), recorded=False), *TURN[1:]]
    assert join_turns([USER], alone, (USER,)) == TURN[1:]


def test_other_turns_are_whole() -> None:
    assert join_turns([], TURN, (USER,)) == TURN
    assert join_turns([7, END], TURN, (END, USER)) == TURN
    assert join_turns([7, TOOL], TURN, (USER, TOOL)) == TURN
    assert join_turns([7, USER], TURN, (END,)) == TURN, "it is no end of an answer"
    assert join_turns([USER], [], (USER,)) == []
