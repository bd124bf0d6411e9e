"""The second conversation: its messages, and how its cost is said."""

from kvrecall_server.demo.english import generate_english
from kvrecall_server.demo.second import (
    EDIT,
    FirstToken,
    SecondConversation,
    edited_messages,
    second_lines,
    second_rows,
)

ASKED = [
    SecondConversation(FirstToken(seconds, 1500, 960), FirstToken(4 * seconds, 1500, 0))
    for seconds in (0.5, 1.0, 3.0)
]


def test_it_begins_with_the_same_system_prompt_and_an_edit_and_ends_with_a_question() -> None:
    conversation = generate_english(3, 1000)
    system, first, *others, last = edited_messages(conversation)
    assert system == {"role": "system", "content": conversation.system}
    assert first == {"role": "user", "content": f"{EDIT} {conversation.exchanges[0].user}"}
    assert [each["role"] for each in others] == ["assistant", "user"] * 2 + ["assistant"]
    asked = next(each for each in conversation.exchanges if each.fact is not None)
    assert last == {"role": "user", "content": asked.question}


def test_two_sentences_compare_medians() -> None:
    shared, alone = second_lines(ASKED)
    assert "960 of its 1,500 tokens cached, first token after 1.00 s." in shared
    assert "0 tokens cached, first token after 4.00 s (n=3)." in alone


def test_the_result_file_has_both_first_tokens_and_what_was_cached() -> None:
    shared, alone = second_rows(ASKED)
    assert (shared["median"], shared["cached_tokens"], shared["n"]) == (1.0, 960, 3)
    assert (alone["median"], alone["cached_tokens"]) == (4.0, 0)
