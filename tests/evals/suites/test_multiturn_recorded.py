"""Dialogues of recorded text, from files in the form of LoCoMo, tau-bench and LongBench."""

import json
from pathlib import Path
from typing import Any

import pytest

from evals.errors import BadDataFile, BadExample, BadSuite
from evals.languages.base import contains_value
from evals.languages.english import ENGLISH
from evals.suites.locomo.data import read_conversation
from evals.suites.multiturn import airline, locomo, longbench
from evals.suites.multiturn.dialogue import Size, check
from evals.suites.multiturn.kinds import build_dialogue, check_kinds

SIZE = Size(turns=2, tokens=400)
SHORT = Size(turns=2, tokens=200)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A folder with two conversations of other people, each line with a question on it."""
    folder = tmp_path / "chats"
    folder.mkdir()
    for name, things in (("ada", "apple bread cello daisy eagle fern"), ("bob", "glue hat ink")):
        words = things.split()
        lines = [
            {"speaker": name, "dia_id": f"D1:{at}", "text": f"{name} bought {word} number {at}."}
            for at, word in enumerate(words * 8)
        ]
        questions = [
            {
                "question": f"What was number {at} of {name}?",
                "answer": f"{line['text'].split()[2]} number {at}",
                "evidence": [line["dia_id"]],
                "category": 4,
            }
            for at, line in enumerate(lines)
        ]
        content = {
            "conversation": {"speaker_a": name, "speaker_b": "Zoe", "session_1": lines},
            "qa": questions,
        }
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def make_run(number: int) -> dict[str, Any]:
    """A recorded run whose agent looked up six reservations."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Help me."}]
    for at in range(6):
        code = f"R{number}{at}"
        record = {
            "reservation_id": code,
            "seat": f"{'ABCDEF'[at]}{number}{at}7",
            "cabin": "economy",
            "price": {"total": 1000 * number + 100 + at},
        }
        call = {"function": {"name": "look_up", "arguments": "{}"}, "id": code, "type": "function"}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": code, "content": json.dumps(record)},
        ]
    return {"task_id": number, "reward": 1.0, "trial": 0, "traj": messages}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "airline.json"
    path.write_text(json.dumps([make_run(number) for number in (1, 2, 3)]))
    return path


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A set of nine items, each with a value of its own in its context."""
    path = tmp_path / "set.jsonl"
    items = [
        {
            "input": f"What does box {number} hold?",
            "context": f"It rained.\n\nBox {number} holds thing{number}.\nThen it stopped.",
            "answers": [f"thing{number}", f"a thing{number}"],
            "dataset": "made",
            "length": 9,
        }
        for number in range(9)
    ]
    path.write_text("\n".join(json.dumps(item) for item in items))
    return path


def test_locomo_evidence_is_in_the_turns_named_and_never_later(chats: Path) -> None:
    for seed in range(12):
        dialogue = locomo.build(seed, SIZE, [chats])
        assert dialogue == locomo.build(seed, SIZE, [chats])
        name = ("ada", "bob")[seed % 2]
        texts = {line.text for line in read_conversation(chats / f"{name}.json").lines}
        for number, turn in enumerate(dialogue.turns):
            (answer,) = turn.answers
            saying = [
                index
                for index, each in enumerate(dialogue.turns)
                if any(contains_value(text, answer) for text in each.segments)
            ]
            assert tuple(saying) == turn.evidence
            assert max(turn.evidence) <= number
            foreign = [text for text in turn.segments if f"{name} bought" not in text]
            assert len(foreign) == 1
            assert not any(text in foreign[0] for text in texts)


def test_some_locomo_questions_are_on_an_earlier_turn_alone(chats: Path) -> None:
    dialogues = [locomo.build(seed, SIZE, [chats]) for seed in range(12)]
    assert {(0,), (1,)} <= {dialogue.turns[1].evidence for dialogue in dialogues}


def test_airline_values_are_said_in_one_turn_alone(runs: Path) -> None:
    for seed in range(12):
        dialogue = airline.build(seed, SHORT, [runs])
        check(dialogue)
        assert dialogue == airline.build(seed, SHORT, [runs])
        for number, turn in enumerate(dialogue.turns):
            (evidence,) = turn.evidence
            assert evidence <= number
            (stating,) = [
                json.loads(text)
                for text in dialogue.turns[evidence].segments
                if turn.answers[0] in text
            ]
            assert stating["reservation_id"] in turn.question
            assert stating["cabin"] not in turn.answers
            assert turn.answers[0] in (stating["seat"], str(stating["price"]["total"]))


def test_airline_values_with_letters_have_candidates_that_were_said(runs: Path) -> None:
    turns = [turn for seed in range(12) for turn in airline.build(seed, SHORT, [runs]).turns]
    chosen = [turn for turn in turns if turn.choices]
    assert chosen
    for turn in chosen:
        assert turn.answers[0] in turn.choices
        assert turn.prefixes == (f"The seat of {turn.question.split()[-1].rstrip('?')} is",)
    assert all(turn.answers[0].isdecimal() for turn in turns if not turn.choices)


def test_longbench_questions_have_their_item_in_their_turn_or_an_earlier_one(bench: Path) -> None:
    earlier = 0
    for seed in range(20):
        dialogue = longbench.build(seed, Size(turns=3), [bench])
        check(dialogue)
        assert dialogue == longbench.build(seed, Size(turns=3), [bench])
        assert len({turn.question for turn in dialogue.turns}) == 3
        for number, turn in enumerate(dialogue.turns):
            assert turn.evidence
            assert max(turn.evidence) <= number
            earlier += number not in turn.evidence
    assert earlier > 5, "some questions are on earlier turns alone"


def test_longbench_contexts_of_other_items_have_no_answer(bench: Path) -> None:
    for seed in range(10):
        dialogue = longbench.build(seed, Size(turns=2), [bench])
        answers = {answer for turn in dialogue.turns for answer in turn.answers}
        for turn in dialogue.turns:
            boxes = [text for text in turn.segments if text.startswith("Box")]
            free = [text for text in boxes if not any(contains_value(text, a) for a in answers)]
            assert len(free) == 2


@pytest.mark.parametrize("module", [locomo, airline, longbench], ids=lambda each: each.__name__)
def test_files_of_another_form_are_refused(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps([{"role": "user", "content": "Hello?"}]))
    with pytest.raises((BadDataFile, BadExample)):
        module.build(0, SIZE, [path, path])


def test_a_longer_dialogue_than_the_recordings_is_refused(chats: Path, runs: Path) -> None:
    with pytest.raises(BadExample, match="take longer dialogues"):
        airline.build(0, Size(turns=6, tokens=900), [runs])
    with pytest.raises(BadExample, match="no 9000 tokens"):
        locomo.build(0, Size(turns=3, tokens=9000), [chats])


def test_kinds_are_known_and_recorded_ones_need_their_data(bench: Path) -> None:
    assert check_kinds([], []) == ("qa", "list", "fewshot")
    assert check_kinds(["locomo", "qa"], ["somewhere"]) == ("locomo", "qa")
    with pytest.raises(BadSuite, match="no kind 'quiz'"):
        check_kinds(["quiz"], [])
    with pytest.raises(BadSuite, match="--data"):
        check_kinds(["locomo"], [])
    with pytest.raises(BadSuite, match="one by one"):
        check_kinds(["locomo", "airline"], ["somewhere"])
    assert build_dialogue("longbench", 0, SIZE, ENGLISH, [str(bench)]).kind == "longbench"
