"""Results of tools as signals of suite planted: their length, their question, their text."""

import json
from functools import partial
from pathlib import Path

import pytest

from evals import harness
from evals.errors import BadDataFile
from evals.suites.planted.facts import Split
from evals.suites.planted.tools import build_result
from reference import MODEL_PATH

count_tokens = partial(harness.count_tokens, harness.load(str(MODEL_PATH)).tokenizer)
QUESTION = "What is the locker of Noor?"


def recorded(path: Path, results: list[str]) -> tuple[str]:
    """A file of as many recordings, each with one result of a tool."""
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "c1", "type": "function", "function": function}
    entries = [
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": result},
            ]
        }
        for result in results
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return (str(path),)


@pytest.mark.parametrize("tokens", [120, 400])
def test_a_result_has_its_length_and_the_question_once(tokens: int) -> None:
    result = build_result((), "tuning", 1, tokens, QUESTION, count_tokens)
    assert result["role"] == "tool"
    assert result["content"].count(QUESTION) == 1
    without = {**result, "content": result["content"].replace(QUESTION, "")}
    assert abs(count_tokens([without]) - tokens) <= 15
    assert result == build_result((), "tuning", 1, tokens, QUESTION, count_tokens)


def test_the_question_stands_at_different_places() -> None:
    texts = [
        str(build_result((), "tuning", seed, 200, QUESTION, count_tokens)["content"])
        for seed in range(6)
    ]
    places = {round(text.index(QUESTION) / len(text), 1) for text in texts}
    assert len(places) >= 3


def test_real_results_of_the_splits_come_from_other_recordings(tmp_path: Path) -> None:
    sources = recorded(tmp_path / "runs.jsonl", ["one, two", "three, four", "five, six"])

    def words(split: Split) -> set[str]:
        texts = [
            str(build_result(sources, split, seed, 80, "", count_tokens)["content"])
            for seed in range(4)
        ]
        return {word for text in texts for word in text.replace(",", " ").split()}

    assert {"one", "five"} <= words("tuning")
    assert {"three", "four"} <= words("held_out")
    assert not words("tuning") & words("held_out")


def test_recordings_without_a_tool_are_refused(tmp_path: Path) -> None:
    sources = recorded(tmp_path / "runs.jsonl", ["", ""])
    with pytest.raises(BadDataFile, match="no result of a tool"):
        build_result(sources, "held_out", 1, 80, QUESTION, count_tokens)
