"""Languages of cases: facts that a reply can be tested for, and small talk around them."""

import json
import random
from pathlib import Path

import pytest

from evals.errors import BadDataFile
from evals.languages.base import Fact, Language
from evals.languages.choice import get_language
from evals.languages.english import ENGLISH
from evals.languages.reference import REFERENCE
from evals.suites.longconv.conversations import generate_topics
from reference import MODEL_PATH

LANGUAGES = pytest.mark.parametrize("language", [REFERENCE, ENGLISH], ids=lambda each: each.name)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A file with one recording of six exchanges, the third with a tool's result."""
    messages = [{"role": "system", "content": "Be kind."}]
    for number in range(6):
        messages.append({"role": "user", "content": f"Tale {number}? It goes on."})
        if number == 3:
            messages.append({"role": "assistant", "content": "Let me look."})
        messages.append({"role": "assistant", "content": f"Reply {number}. " + "word " * 60})
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"id": "talk", "messages": messages}) + "\n")
    return path


def draw_fact(language: Language, seed: int = 1) -> Fact:
    rng = random.Random(seed)
    attribute = rng.choice(language.attributes)
    value = language.draw_value(rng, attribute, set())
    return Fact(language.draw_names(rng)[0], attribute, value)


@LANGUAGES
def test_a_statement_has_the_span_that_its_question_needs(language: Language) -> None:
    for seed in range(30):
        fact = draw_fact(language, seed)
        assert language.statement_span(fact) in language.state(random.Random(seed), fact)
        question = language.ask(random.Random(seed), fact)
        assert fact.name in question
        assert fact.attribute in question
        assert fact.value not in question


@LANGUAGES
def test_only_the_whole_value_is_an_answer(language: Language) -> None:
    value = draw_fact(language).value
    assert language.is_answer(f"It is {value}.", value)
    assert not language.is_answer(f"It is {value}9.", value)
    assert not language.is_answer(f"It is X{value}.", value)
    assert not language.is_answer("Noted.", value)


def test_plain_english_takes_an_answer_anywhere_in_a_reply() -> None:
    assert ENGLISH.is_answer("It is 5271, as you said.", "5271")
    assert not ENGLISH.is_answer("It is 527.", "5271")
    assert not REFERENCE.is_answer("It is 5271, as you said.", "5271")


def test_plain_english_says_a_fact_twice() -> None:
    fact = Fact("Noor", "secret code", "43481")
    said = ENGLISH.state(random.Random(0), fact) + ENGLISH.acknowledge(random.Random(0), fact)
    assert said.count("of Noor is 43481") == 2


@LANGUAGES
def test_a_conversation_has_its_values_once_each_and_as_many_people(language: Language) -> None:
    conversation = generate_topics(3, 2500, 4, 20, language)
    values = [question.answer for question in conversation.questions]
    assert len(set(values)) == 20
    for value in values:
        stating = [user for user, _ in conversation.exchanges if language.is_answer(user, value)]
        stating += [user for user, _ in conversation.exchanges if value in user]
        assert len(set(stating)) == 1


def test_the_reference_model_has_its_own_language_and_any_other_plain_english() -> None:
    assert get_language(str(MODEL_PATH)) is get_language("reference") is REFERENCE
    assert get_language("somewhere/SmolLM2-135M-Instruct") is ENGLISH


def test_small_talk_of_a_recording_goes_on_where_it_was(recorded: Path) -> None:
    language = get_language("some model", (str(recorded),))
    (topic,) = language.topics
    said: list[str] = []
    talk = [language.small_talk(random.Random(5), topic, said) for _ in range(8)]
    numbers = [int(user.split()[1].rstrip("?")) for user, _ in talk]
    assert numbers == [(numbers[0] + step) % 6 for step in range(8)]
    assert all(reply.startswith(("Reply", "Let me look. Reply")) for _, reply in talk)
    assert language.state(random.Random(0), draw_fact(ENGLISH)) == ENGLISH.state(
        random.Random(0), draw_fact(ENGLISH)
    )


def test_a_recording_before_a_question_is_cut_at_a_sentence(recorded: Path) -> None:
    language = get_language("some model", (str(recorded),))
    user, reply = language.lead(random.Random(0), language.topics[0])
    assert user.endswith("It goes on.")
    assert len(reply) <= 160
    assert reply.endswith(".")


def test_recordings_without_an_exchange_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "silent.json"
    path.write_text(json.dumps([{"role": "user", "content": "Hello?"}]))
    with pytest.raises(BadDataFile, match="no exchange"):
        get_language("some model", (str(path),))
