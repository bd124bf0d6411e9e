"""Conversations on several topics: functions of their seed, with one answer per question."""

from itertools import groupby
from typing import Any

import pytest

from evals.errors import BadExample
from evals.suites.longconv.conversations import generate_topics


def test_the_same_arguments_give_the_same_conversation_and_another_seed_another() -> None:
    assert generate_topics(3, 2000) == generate_topics(3, 2000)
    assert generate_topics(3, 2000) != generate_topics(4, 2000)


def test_every_answer_is_stated_once_in_an_exchange_of_its_topic() -> None:
    conversation = generate_topics(5, 3000, n_topics=6, n_questions=20)
    assert len(conversation.questions) == 20
    assert len(set(conversation.topics)) == 6
    for question in conversation.questions:
        stating = [
            number
            for number, (user, _) in enumerate(conversation.exchanges)
            if f" {question.answer}" in user
        ]
        assert len(stating) == 1
        assert conversation.topics[stating[0]] == question.topic
        thirds = ("early", "middle", "late")
        assert question.place == thirds[min(2, 3 * stating[0] // len(conversation.exchanges))]


def test_topics_come_in_stretches_and_recur() -> None:
    topics = generate_topics(7, 4096).topics
    stretches = [topic for topic, _ in groupby(topics)]
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


@pytest.mark.parametrize("sizes", [{"n_questions": 43}, {"n_topics": 13}])
def test_more_than_the_language_has_is_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(BadExample, match="at most 42 questions and 12 topics"):
        generate_topics(0, 4096, **sizes)
