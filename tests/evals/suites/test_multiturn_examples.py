"""Generated dialogues: evidence where a turn says it is, and the question where it was placed."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.errors import BadExample
from evals.languages.base import Language, contains_value
from evals.languages.english import ENGLISH
from evals.languages.reference import REFERENCE
from evals.suites.multiturn.dialogue import (
    PLACES,
    Dialogue,
    Size,
    Turn,
    check,
    evidence_class,
    render,
)
from evals.suites.multiturn.examples import LABELS, LIST_LINES, generate

SEEDS = st.integers(0, 100_000)
LANGUAGES = st.sampled_from([REFERENCE, ENGLISH])
KINDS = st.sampled_from(["qa", "list", "fewshot"])
TURN = Turn(("one", "two", "three"), "Which?", ("two",), (0,), cue="Answer.")


def turns_that_state(dialogue: Dialogue, value: str) -> list[int]:
    return [
        number
        for number, turn in enumerate(dialogue.turns)
        if any(contains_value(text, value) for text in turn.segments)
    ]


@given(KINDS, SEEDS, LANGUAGES)
def test_a_dialogue_is_a_function_of_its_kind_seed_and_size(
    kind: str, seed: int, language: Language
) -> None:
    dialogue = generate(kind, seed, Size(), language)
    assert dialogue == generate(kind, seed, Size(), language)
    assert dialogue.turns != generate(kind, seed + 1, Size(), language).turns
    assert len(dialogue.turns) == 3


@given(SEEDS, LANGUAGES, st.integers(1, 3))
def test_each_answer_is_stated_in_one_segment_of_exactly_the_turns_named(
    seed: int, language: Language, statements: int
) -> None:
    dialogue = generate("qa", seed, Size(statements=statements), language)
    for turn in dialogue.turns:
        assert len(turn.evidence) == len(turn.answers)
        places = {answer: turns_that_state(dialogue, answer) for answer in turn.answers}
        assert sorted(place for each in places.values() for place in each) == list(turn.evidence)
        for answer in turn.answers:
            stating = [
                text
                for each in dialogue.turns
                for text in each.segments
                if contains_value(text, answer)
            ]
            assert len(stating) == 1
            assert stating[0].count(answer) == statements


@given(SEEDS, LANGUAGES)
def test_no_fact_is_asked_for_twice(seed: int, language: Language) -> None:
    dialogue = generate("qa", seed, Size(turns=4), language)
    answers = [answer for turn in dialogue.turns for answer in turn.answers]
    assert len(set(answers)) == len(answers)


@given(SEEDS, LANGUAGES)
def test_candidates_were_said_and_begin_unlike_each_other(seed: int, language: Language) -> None:
    dialogue = generate("qa", seed, Size(), language)
    for number, turn in enumerate(dialogue.turns):
        assert set(turn.answers) <= set(turn.choices)
        assert len({choice[0] for choice in turn.choices}) == len(turn.choices) == 4
        assert all(min(turns_that_state(dialogue, choice)) <= number for choice in turn.choices)


@given(SEEDS, LANGUAGES)
def test_a_list_has_its_lines_in_all_turns_up_to_it_and_no_earlier_answer_has_any(
    seed: int, language: Language
) -> None:
    dialogue = generate("list", seed, Size(), language)
    for number, turn in enumerate(dialogue.turns):
        stated = [turns_that_state(dialogue, answer) for answer in turn.answers]
        assert len(stated) == LIST_LINES
        assert {place for places in stated for place in places} == set(range(number + 1))
    answers = [answer for turn in dialogue.turns for answer in turn.answers]
    assert len(set(answers)) == len(answers)


@given(SEEDS, LANGUAGES)
def test_a_label_stands_for_one_topic_in_all_turns(seed: int, language: Language) -> None:
    dialogue = generate("fewshot", seed, Size(), language)
    topics: dict[str, set[str]] = {}
    for turn in dialogue.turns:
        examples = [text.rsplit(" (", 1)[1].split(") -> ") for text in turn.segments]
        assert sorted(label for _, label in examples) == sorted(LABELS)
        for topic, label in examples:
            topics.setdefault(topic, set()).add(label)
        (prefix,) = turn.prefixes
        assert topics[prefix.rsplit(" (", 1)[1].removesuffix(") ->")] == set(turn.answers)
    assert all(len(labels) == 1 for labels in topics.values())


def test_the_shares_of_evidence_hold_over_many_dialogues() -> None:
    dialogues = [generate("qa", seed, Size(), REFERENCE) for seed in range(400)]
    classes = Counter(
        evidence_class(turn.evidence, number)
        for dialogue in dialogues
        for number, turn in enumerate(dialogue.turns)
    )
    total = sum(classes.values())
    assert classes["own"] / total == pytest.approx(0.4, abs=0.03)
    assert classes["earlier"] / total == pytest.approx(0.4, abs=0.03)
    assert classes["multi"] / total == pytest.approx(0.2, abs=0.03)


def test_a_question_stands_before_between_or_behind_the_segments() -> None:
    assert render(TURN, "begin").split("\n") == ["Which?", "one", "two", "three", "Answer."]
    assert render(TURN, "middle").split("\n") == ["one", "Which?", "two", "three", "Answer."]
    assert render(TURN, "end").split("\n") == ["one", "two", "three", "Which?"]


@given(SEEDS, LANGUAGES)
def test_places_differ_in_order_alone(seed: int, language: Language) -> None:
    (turn, *_) = generate("qa", seed, Size(), replace(language, closing_cue="")).turns
    texts = {place: sorted(render(turn, place).split("\n")) for place in PLACES}
    assert texts["begin"] == texts["middle"] == texts["end"]


@pytest.mark.parametrize(
    "segments",
    [("two", "two again"), ("none",)],
    ids=["stated in another turn as well", "stated in none"],
)
def test_evidence_elsewhere_than_named_is_refused(segments: tuple[str, ...]) -> None:
    first = replace(TURN, segments=segments)
    second = replace(TURN, segments=("two",), evidence=(1,), question="And now?")
    other = replace(first, answers=("one",), segments=("one", *segments))
    with pytest.raises(BadExample, match="are stated in turns"):
        check(
            Dialogue(0, "qa", "", (other, second) if "two" in segments else (first,)),
        )


def test_a_question_that_says_its_answer_is_refused() -> None:
    with pytest.raises(BadExample, match="are stated in turns"):
        check(Dialogue(0, "qa", "", (replace(TURN, question="Is it two?"),)))


def test_more_people_than_the_language_has_are_refused() -> None:
    with pytest.raises(BadExample, match="too few people"):
        generate("qa", 0, Size(turns=6, distractors=5), REFERENCE)
