"""The log by which a worker computes a session again says what each turn was and left."""

from dataclasses import replace

from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.session import Turn
from services.sessions.turn_log import logged_turns


def make_turn(number: int, deferred: int) -> Turn:
    outcome = TurnOutcome(
        "s", number, None, "appended", 3, 0, MemoryReport(), (), {}, deferred_tokens=deferred
    )
    return Turn("s", number, (Message("user", "a b c"),), (1, 2, 3), outcome)


def test_each_turn_says_how_much_waits_for_the_next_repair() -> None:
    log = logged_turns([make_turn(1, 3), make_turn(2, 6), make_turn(3, 0)], [])
    assert [turn.deferred_tokens for turn in log] == [3, 6, 0]
    assert [list(turn.token_ids) for turn in log] == [[1, 2, 3]] * 3


def test_a_first_turn_says_what_it_took_of_stored_pages() -> None:
    turn = make_turn(1, 0)
    turn = replace(turn, outcome=replace(turn.outcome, shared_tokens=128))
    assert [each.shared_tokens for each in logged_turns([turn, make_turn(2, 0)], [])] == [128, 0]
