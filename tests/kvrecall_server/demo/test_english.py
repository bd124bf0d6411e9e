"""Generated conversations in English."""

import json

import pytest

from kvrecall_server.demo.conversation import Conversation, Exchange
from kvrecall_server.demo.english import generate_english

TOKENS = 3900


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    return generate_english(7, TOKENS)


def questions(conversation: Conversation) -> list[Exchange]:
    return [each for each in conversation.exchanges if each.fact is not None]


def stated(conversation: Conversation, question: Exchange) -> Exchange:
    assert question.fact is not None
    return conversation.exchanges[question.fact]


def test_a_conversation_is_a_function_of_its_seed(conversation: Conversation) -> None:
    again = generate_english(7, TOKENS)
    assert [each.user for each in again.exchanges] == [each.user for each in conversation.exchanges]
    other = generate_english(8, TOKENS)
    assert other.exchanges[0].user != conversation.exchanges[0].user


@pytest.mark.parametrize("seed", range(5))
def test_the_default_length_has_10_questions_and_as_many_facts(seed: int) -> None:
    asked = questions(generate_english(seed, TOKENS))
    assert len(asked) == 10
    assert len({each.fact for each in asked}) == len(asked)
    assert sum(each.needs_tool for each in asked) == 3


def test_a_question_follows_its_statement_which_says_the_value(conversation: Conversation) -> None:
    for index, exchange in enumerate(conversation.exchanges):
        if exchange.fact is None:
            continue
        statement = stated(conversation, exchange)
        assert exchange.fact < index
        assert exchange.is_right(statement.user)
        assert exchange.is_right(statement.reply)
        assert exchange.is_right(exchange.reply)


def test_no_other_statement_answers_a_question(conversation: Conversation) -> None:
    asked = questions(conversation)
    for question in asked:
        others = [stated(conversation, each) for each in asked if each is not question]
        assert not any(question.is_right(each.user) for each in others)


def test_a_reply_is_right_if_it_has_the_whole_value_in_it(conversation: Conversation) -> None:
    question = questions(conversation)[0]
    value = question.reply.removesuffix(".").partition(" is ")[2]
    assert question.is_right(f"I think it is {value}, is it not?")
    assert not question.is_right(f"It is {value}0.")
    assert not question.is_right("I do not know.")


def test_a_recorded_call_names_the_person_that_the_user_asks_about(
    conversation: Conversation,
) -> None:
    calls = [each.recorded_call for each in conversation.exchanges if each.recorded_call]
    for call in calls:
        asked, result = json.loads(call.arguments), json.loads(call.result)
        (person,) = [value for key, value in result.items() if key not in {*asked, "from", "until"}]
        assert f" of {person}?" in call.question


def test_a_short_conversation_has_questions_with_and_without_a_tool() -> None:
    kinds = {each.needs_tool for each in questions(generate_english(1, 200))}
    assert kinds == {True, False}
