"""Conversations in a worker: appended within the budget, asked many times from one state."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from evals import episodes, harness
from evals.harness import Setup
from evals.suites.longconv.conversations import TopicConversation, generate_topics
from kvrecall.domain.settings.session import EpisodeSettings

MakeSetup = Callable[..., Setup]
BUDGET = "160"


@pytest.fixture(scope="module")
def conversation() -> TopicConversation:
    return generate_topics(5, 600, 4, 6)


def test_every_question_is_asked_from_the_same_state(
    make_setup: MakeSetup, conversation: TopicConversation
) -> None:
    with harness.open_session(make_setup("keydiff", BUDGET), conversation.messages()) as session:
        first = [session.ask(question.messages(), 24) for question in conversation.questions]
        again = [
            session.ask(question.messages(), 24) for question in reversed(conversation.questions)
        ]
        length = session.state.length
        assert [done.token_ids for done in first] == [done.token_ids for done in reversed(again)]
        session.restore()
        assert session.scheduler.memory("asked").result().length == length


def test_a_history_fills_its_budget_and_reports_it(
    make_setup: MakeSetup, conversation: TopicConversation
) -> None:
    with harness.open_session(make_setup("snapkv", BUDGET), conversation.messages()) as session:
        kept = int(BUDGET) - session.state.unsettled  # the others are computed with the next turn
        assert kept <= harness.active_rows(session) <= int(BUDGET)
        assert session.state.length > 2 * int(BUDGET)
        assert len(session.token_ids) == session.state.length + len(session.state.pending)


def test_utterances_cover_the_log_without_a_gap(
    make_setup: MakeSetup, conversation: TopicConversation
) -> None:
    with harness.open_session(make_setup("snapkv", BUDGET), conversation.messages()) as session:
        stops = [utterance.stop for utterance in session.utterances]
        assert [utterance.start for utterance in session.utterances] == [0, *stops[:-1]]
        assert stops[-1] == len(session.token_ids)
        assert [utterance.text for utterance in session.utterances] == [
            text for exchange in conversation.exchanges for text in exchange
        ]


def test_a_history_is_split_into_turns_of_whole_exchanges_that_fit_a_block(
    make_setup: MakeSetup, conversation: TopicConversation
) -> None:
    tokenizer = harness.load(make_setup("full").model).tokenizer
    turns = harness.split_turns(conversation.messages(), tokenizer, 128)
    assert [message for turn in turns for message in turn] == conversation.messages()
    assert all(turn[-1]["role"] == "assistant" for turn in turns)
    assert all(turn[0]["role"] == "user" for turn in turns[1:])
    assert all(harness.count_tokens(tokenizer, turn) <= 128 for turn in turns)
    assert len(turns) < len(conversation.exchanges)


@pytest.mark.parametrize("build", ["one_pass", "per_episode"])
def test_an_episode_is_active_for_its_question_alone(
    make_setup: MakeSetup, conversation: TopicConversation, build: str
) -> None:
    with harness.open_session(
        make_setup(f"epicache+{build}@uniform", BUDGET), conversation.messages()
    ) as session:
        settings = EpisodeSettings(
            count=2, build="one_pass" if build == "one_pass" else "per_episode"
        )
        built = episodes.build(session, settings)
        assert len(built.episodes) == 2
        assert 0 < built.index_bytes < 0.02 * built.copy_bytes
        matched = episodes.match_text(built, conversation.questions[0].text)
        assert matched is not None
        moved = [
            session.ask(
                conversation.questions[0].messages(), 8, matched.episode
            ).switched.rows_moved
            for _ in range(2)
        ]
        assert moved[0] == moved[1] > 0
        assert not session.ask(conversation.questions[0].messages(), 8).switched.episode


def test_the_members_of_all_episodes_are_the_whole_log(
    make_setup: MakeSetup, conversation: TopicConversation
) -> None:
    with harness.open_session(
        make_setup("epicache@uniform", BUDGET), conversation.messages()
    ) as session:
        built = episodes.build(session, EpisodeSettings(count=3))
        spans = sorted(span for members in built.members for span in members)
        assert spans[0][0] == 0
        assert spans[-1][1] == session.state.length
        assert all(before[1] == after[0] for before, after in pairwise(spans))
