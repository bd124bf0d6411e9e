"""Who says what in a log, and with which tokens."""

from collections.abc import Callable

import pytest

from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.session import Turn
from kvrecall.domain.utterances import Utterance, query_text, utterances

CALL = ToolCall("c", "weather", '{"city": "Bern"}')


@pytest.fixture
def turn() -> Callable[..., Turn]:
    """A turn of so many tokens per utterance.

    Its last message is the answer, unless it is only remembered.
    """

    def make(number: int, counts: list[int], *messages: Message, answer: str | None = None) -> Turn:
        said = None if answer is None else Message("assistant", answer)
        outcome = TurnOutcome("s", number, said, "stop", 1, 1, MemoryReport(), (), {})
        return Turn("s", number, messages, tuple(range(sum(counts))), outcome, tuple(counts))

    return make


def test_messages_of_one_side_are_one_utterance(turn: Callable[..., Turn]) -> None:
    first = turn(
        1,
        [5, 3],
        Message("system", "be kind"),
        Message("user", "hello"),
        Message("user", "you"),
        answer="hi",
    )
    result = Message("tool", "rain", tool_call_id="c")
    thanks = Message("user", "thanks")
    second = turn(2, [4, 2, 1], Message("assistant", "", (CALL,)), result, thanks, answer="bye")
    assert utterances([first, second], start=10) == [
        Utterance("user", "hello\nyou", 10, 15, 1, 0),
        Utterance("assistant", "hi", 15, 18, 1, 1),
        Utterance("assistant", 'weather {"city": "Bern"}', 18, 22, 2, 0),
        Utterance("user", "rain\nthanks", 22, 24, 2, 1),
        Utterance("assistant", "bye", 24, 25, 2, 2),
    ]


def test_an_answer_after_a_recorded_one_is_an_utterance_of_its_own(
    turn: Callable[..., Turn],
) -> None:
    found = utterances(
        [turn(1, [2, 3, 4], Message("user", "a"), Message("assistant", "b"), answer="c")]
    )
    assert [(each.side, each.text, each.stop) for each in found] == [
        ("user", "a", 2),
        ("assistant", "b", 5),
        ("assistant", "c", 9),
    ]


def test_a_turn_whose_tokens_are_told_otherwise_counts_as_one_utterance(
    turn: Callable[..., Turn],
) -> None:
    told = turn(3, [7], Message("user", "a"), answer="b")
    assert utterances([told]) == [Utterance("user", "a\nb", 0, 7, 3, 0)]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            [
                Message("user", "a"),
                Message("assistant", "b"),
                Message("user", "c"),
                Message("user", "d"),
            ],
            "a\nb\nc\nd",
        ),
        ([Message("user", "a"), Message("assistant", "b")], "a"),
        ([Message("tool", "rain", tool_call_id="c")], "rain"),
        ([Message("system", "be kind")], ""),
        ([Message("user", "a"), Message("assistant", "b"), Message("system", "hurry")], "a\nb"),
        ([], ""),
    ],
)
def test_a_query_is_what_was_said_up_to_the_users_last_word(
    messages: list[Message], text: str
) -> None:
    assert query_text(messages) == text
