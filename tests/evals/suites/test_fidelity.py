"""Suite fidelity on a short recording."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evals import harness
from evals.configs import arms_of
from evals.errors import BadDataFile
from evals.harness import Setup
from evals.suites import fidelity
from evals.suites.longconv.conversations import generate_topics

SetupOf = Callable[..., Setup]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two recordings: one of several topics, one of a tool's use."""
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "ticket_owner", "arguments": '{"ticket": "123"}'},
    }
    with_a_tool = [
        {"role": "user", "content": "Who owns ticket 123?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"owner": "Anna"}'},
        {"role": "assistant", "content": "Anna owns it."},
        {"role": "user", "content": "Thank you."},
    ]
    recordings = [generate_topics(4, 500, 3, 4).messages(), with_a_tool]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in recordings))
    return path


def replayed(
    setup: Setup, recorded: Path, budgets: list[str], arm: str, limit: int = 1
) -> list[Any]:
    suite = fidelity.suite(setup, arms_of([arm]), budgets, [recorded], limit, 1200)
    return [record for unit in suite.units for record in suite.run(unit)]


def test_under_a_budget_over_the_length_nothing_differs_and_under_a_small_one_it_does(
    setup_of: SetupOf, recorded: Path
) -> None:
    found = replayed(setup_of("full"), recorded, ["1200", "64"], "snapkv")
    whole = [record["kl"] for record in found if record["budget"] == "1200"]
    small = [record["kl"] for record in found if record["budget"] == "64"]
    assert len(whole) == len(small) > 8
    assert whole == pytest.approx([0.0] * len(whole), abs=1e-5)
    assert max(small) > 0.01
    assert all(record["heard"] > 0 for record in found)


def test_a_method_with_episodes_builds_them_on_the_way_the_same_every_time(
    setup_of: SetupOf, recorded: Path, timeless: Callable[[Any], Any]
) -> None:
    first = replayed(setup_of("full"), recorded, ["96"], "epicache@uniform")
    assert timeless(first) == timeless(
        replayed(setup_of("full"), recorded, ["96"], "epicache@uniform")
    )
    without = replayed(setup_of("full"), recorded, ["96"], "epicache+none@uniform")
    assert [record["kl"] for record in first] != [record["kl"] for record in without]


def test_tool_calls_and_their_results_are_said_as_they_were(
    setup_of: SetupOf, recorded: Path
) -> None:
    found = replayed(setup_of("full"), recorded, ["1200"], "keydiff", limit=2)
    assert len([record for record in found if record["recording"] == "runs 2"]) == 2


def test_a_recording_is_cut_where_the_next_turn_would_not_fit(setup_of: SetupOf) -> None:
    tokenizer = harness.loaded(setup_of("full").model).tokenizer
    messages = generate_topics(4, 500, 3, 4).messages()
    turns = fidelity.turns_within(messages, tokenizer, 300)
    said = [message for turn in turns for message in turn]
    assert said == messages[: len(said)]
    assert 100 < harness.tokens_of(tokenizer, said) <= 300
    assert fidelity.turns_within(messages, tokenizer, 10) == []


def test_a_folder_without_files_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadDataFile, match="no JSON file"):
        fidelity.recordings_of(tmp_path)
