"""The agent's conversation: a function of its seed, whose questions its own messages answer."""

import pytest

from benchmarks.peers.conversation import (
    Conversation,
    Turn,
    ask_message,
    call_messages,
    generate,
    result_message,
)
from benchmarks.peers.subjects.history import History
from evals.languages.choice import get_language
from reference import MODEL_PATH
from workers.model.tokenizer import load_tokenizer

ENGLISH = get_language("smollm2")


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    return generate(ENGLISH, seed=3, turns=24, tokens=7500, reply_tokens=20)


def said_by(turns: tuple[Turn, ...]) -> str:
    return "\n".join(f"{turn.user}\n{turn.call}\n{turn.result}\n{turn.ask}" for turn in turns)


def test_a_conversation_is_a_function_of_its_seed(conversation: Conversation) -> None:
    assert generate(ENGLISH, 3, 24, 7500, 20) == conversation
    assert generate(ENGLISH, 4, 24, 7500, 20) != conversation


def test_every_answer_was_stated_as_long_ago_as_its_age_says(conversation: Conversation) -> None:
    turns = (*conversation.turns, conversation.last)
    for number, turn in enumerate(turns):
        stated = turns[number - turn.age]
        assert turn.answer in stated.user
        assert turn.answer in stated.call
        assert turn.answer not in turn.ask
        between = turns[number - turn.age + 1 : number + 1]
        assert turn.answer not in said_by(between), "only its statement tells the answer"


def test_facts_come_early_and_are_asked_for_until_the_end(conversation: Conversation) -> None:
    assert [turn.age for turn in conversation.turns[:6]] == [0, 1, 1, 1, 1, 1]
    late = [turn.age for turn in conversation.turns[12:]]
    assert min(late) > 5
    assert len({turn.answer for turn in conversation.turns[12:]}) == len(ENGLISH.attributes)


def test_a_tool_result_names_the_person_asked_for(conversation: Conversation) -> None:
    for turn in conversation.turns:
        assert turn.person in turn.ask
        assert turn.person in turn.result
        assert (
            turn.person in call_messages(turn, "call")[1]["tool_calls"][0]["function"]["arguments"]
        )
    assert not conversation.last.has_call


def test_the_session_is_about_as_long_as_asked_for() -> None:
    language = get_language(str(MODEL_PATH))
    conversation = generate(language, seed=5, turns=8, tokens=1600, reply_tokens=10)
    history = History(load_tokenizer(MODEL_PATH, []))
    for turn in conversation.turns:
        messages = [*call_messages(turn, "c"), result_message(turn, "c"), ask_message(turn)]
        history.append(messages, generate=True)
        history.append_reply([1] * 10)
    assert 1200 < len(history.token_ids) < 2400


def test_a_session_of_one_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two turns"):
        generate(ENGLISH, 3, 1, 300, 20)
