"""Conversations on several topics: functions of their seed, whose questions can be answered from one place each."""

import pytest

from evals.suites.longconv.conversations import generate_topics


def test_the_same_arguments_give_the_same_conversation_and_another_seed_another() -> None:
    assert generate_topics(3, 2000) == generate_topics(3, 2000)
    assert generate_topics(3, 2000) != generate_topics(4, 2000)


def test_every_answer_is_said_once_in_an_exchange_of_its_topic() -> None:
    said = generate_topics(5, 3000, n_topics=6, n_questions=20)
    assert len(said.questions) == 20
    assert len(set(said.topics)) == 6
    for question in said.questions:
        places = [n for n, (user, _) in enumerate(said.exchanges) if f" {question.answer}" in user]
        assert len(places) == 1
        assert said.topics[places[0]] == question.topic
        thirds = ("early", "middle", "late")
        assert question.place == thirds[min(2, 3 * places[0] // len(said.exchanges))]


def test_topics_come_in_stretches_and_come_back() -> None:
    topics = generate_topics(7, 4096).topics
    stretches = [topic for at, topic in enumerate(topics) if at == 0 or topic != topics[at - 1]]
    assert sorted(stretches) == sorted([*set(topics)] * 2), (
        "each topic is visited twice, never twice in a row"
    )


def test_a_question_follows_a_line_on_its_topic() -> None:
    question = generate_topics(1, 1000, n_questions=4).questions[0]
    roles = [(message["role"], message["content"]) for message in question.messages()]
    assert roles == [
        ("user", question.lead[0]),
        ("assistant", question.lead[1]),
        ("user", question.text),
    ]


def test_only_the_value_itself_answers() -> None:
    question = generate_topics(1, 1000, n_questions=4).questions[0]
    assert question.is_answered_by(f"The list says so: {question.answer}.")
    assert not question.is_answered_by(f"{question.answer} it is, I think.")
    assert not question.is_answered_by(f"The list says X{question.answer}.")


@pytest.mark.parametrize("asked", [{"n_questions": 43}, {"n_topics": 13}])
def test_more_than_the_language_holds_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at most 42 questions and 12 topics"):
        generate_topics(0, 4096, **asked)
