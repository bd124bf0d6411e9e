"""Suite locomo on a file of two sessions."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evals import harness
from evals.configs import parse_configs
from evals.errors import BadDataFile
from evals.harness import Setup
from evals.suites.locomo import answers as locomo_answers
from evals.suites.locomo import matching as locomo_matching
from evals.suites.locomo import suite as locomo
from evals.suites.locomo.answers import Answering, f1, fit_history
from evals.suites.locomo.data import Question, read_conversation
from evals.suites.locomo.matching import Matching, chance_of_all

MakeSetup = Callable[..., Setup]


def test_a_file_is_read_with_the_questions_whose_evidence_is_in_it(locomo_file: Path) -> None:
    conversation = read_conversation(locomo_file)
    assert [line.id for line in conversation.lines] == [
        f"D{session}:{number}" for session in (1, 2) for number in range(1, 5)
    ]
    assert [(question.category, question.evidence) for question in conversation.questions] == [
        ("single-hop", frozenset({"D1:3"})),
        ("multi-hop", frozenset({"D2:1", "D2:3"})),
        ("temporal", frozenset({"D2:1"})),
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"conversation": {}}'])
def test_a_file_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BadDataFile, match=r"other\.json is no LoCoMo file"):
        read_conversation(path)


def test_the_matched_episode_has_the_evidence_of_a_clear_topic(locomo_file: Path) -> None:
    found = locomo_matching.run(Matching(str(locomo_file), 2, (1, 2), 0))
    assert [record["category"] for record in found] == ["single-hop", "multi-hop", "temporal"]
    assert all(record["share"] == [1.0, 1.0] for record in found)
    assert all(record["chance_share"] == [1.0, 0.5] for record in found)
    assert [record["chance_whole"][1] for record in found] == pytest.approx([1 / 2, 1 / 6, 1 / 2])
    assert found == locomo_matching.run(Matching(str(locomo_file), 2, (1, 2), 0))


@pytest.mark.parametrize(
    ("wanted", "size", "segments"), [(1, 3, 10), (2, 4, 9), (3, 3, 7), (4, 3, 7)]
)
def test_the_chance_of_all_evidence_agrees_with_shuffles(
    wanted: int, size: int, segments: int
) -> None:
    rng = random.Random(0)
    draws = 20_000
    hits = sum(set(range(wanted)) <= set(rng.sample(range(segments), size)) for _ in range(draws))
    assert chance_of_all(wanted, size, segments) == pytest.approx(hits / draws, abs=0.01)


@pytest.mark.parametrize(
    ("category", "answer", "reply", "expected"),
    [
        ("single-hop", "Cherry tomatoes", "The cherry tomatoes.", 1.0),
        ("single-hop", "Cherry tomatoes", "tomatoes", 2 / 3),
        ("single-hop", "Cherry tomatoes", "no idea", 0.0),
        ("single-hop", "two two", "two", 2 / 3),
        ("single-hop", "Cherry tomatoes", "", 0.0),
        ("multi-hop", "Rome, Paris", "Paris, Rome", 1.0),
        ("multi-hop", "Rome, Paris", "Paris", 0.5),
        ("open-domain", "Yes; he said so", "yes", 1.0),
        ("temporal", "Yes; he said so", "yes", 2 / 5),
    ],
)
def test_f1_by_hand(category: str, answer: str, reply: str, expected: float) -> None:
    assert f1(reply, Question("?", answer, category, frozenset())) == pytest.approx(expected)


def test_a_history_is_truncated_to_its_first_messages_and_lists_their_lines(
    make_setup: MakeSetup, locomo_file: Path
) -> None:
    tokenizer = harness.load(make_setup("full").model).tokenizer
    conversation = read_conversation(locomo_file)
    messages, lines = fit_history(conversation, tokenizer, 10_000)
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 4]
    assert lines == {line.id for line in conversation.lines}
    assert messages[1]["content"] == "(1 May) I planted tomatoes in the garden."
    fewer, first = fit_history(conversation, tokenizer, 150)
    assert messages[: len(fewer)] == fewer
    assert 0 < len(first) < len(lines)


def test_a_model_is_asked_only_about_its_history(make_setup: MakeSetup, locomo_file: Path) -> None:
    first = Answering(make_setup("full", "1/1"), str(locomo_file), 10, 10_000)
    assert len(locomo_answers.run(first)) == 3
    truncated = Answering(make_setup("full", "1/1"), str(locomo_file), 10, 200)
    assert [record["category"] for record in locomo_answers.run(truncated)] == ["single-hop"]


def test_the_suite_matches_all_files_and_answers_only_with_a_model(
    make_setup: MakeSetup, locomo_file: Path, without_seconds: Callable[[Any], Any]
) -> None:
    alone = locomo.suite(locomo_file, None, 0, [2], [2, 4], [])
    assert alone.model == locomo.NO_MODEL
    first = Answering(make_setup("full", ""), "", 10, 10_000)
    answers = locomo.answering_units(first, locomo_file, None, parse_configs(["snapkv"]), ["48"])
    both = locomo.suite(locomo_file, None, 0, [2], [2, 4], answers)
    records = [record for unit in both.units for record in both.run(unit)]
    rows = both.rows(records)
    assert [
        row["mean"]
        for row in rows
        if row.get("method") == "k-means" and row["condition"] == locomo_matching.SHARE
    ]
    counts = {
        (row["method"], row["share"]): row["n"]
        for row in rows
        if row["condition"] == "F1, all questions"
    }
    assert counts == {("full", "1/1"): 3, ("snapkv", "48"): 3}
    assert without_seconds(records) == without_seconds(
        [record for unit in both.units for record in both.run(unit)]
    )
