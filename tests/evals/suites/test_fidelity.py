"""Suite fidelity on a short recording."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evals import harness
from evals.configs import parse_configs
from evals.errors import BadDataFile
from evals.harness import Setup
from evals.suites import fidelity
from evals.suites.longconv.conversations import generate_topics

MakeSetup = Callable[..., Setup]


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


def replay(
    setup: Setup, recorded: Path, budgets: list[str], config: str, limit: int = 1
) -> list[Any]:
    suite = fidelity.suite(setup, parse_configs([config]), budgets, [recorded], limit, 1200)
    return [record for unit in suite.units for record in suite.run(unit)]


def test_only_a_budget_below_the_length_changes_distributions(
    make_setup: MakeSetup, recorded: Path
) -> None:
    found = replay(make_setup("full"), recorded, ["1200", "64"], "snapkv")
    whole = [record["kl"] for record in found if record["budget"] == "1200"]
    small = [record["kl"] for record in found if record["budget"] == "64"]
    assert len(whole) == len(small) > 8
    assert whole == pytest.approx([0.0] * len(whole), abs=1e-5)
    assert max(small) > 0.01
    assert all(record["heard"] > 0 for record in found)


def test_a_method_with_episodes_builds_them_reproducibly(
    make_setup: MakeSetup, recorded: Path, without_seconds: Callable[[Any], Any]
) -> None:
    first = replay(make_setup("full"), recorded, ["96"], "epicache@uniform")
    assert without_seconds(first) == without_seconds(
        replay(make_setup("full"), recorded, ["96"], "epicache@uniform")
    )
    without = replay(make_setup("full"), recorded, ["96"], "epicache+none@uniform")
    assert [record["kl"] for record in first] != [record["kl"] for record in without]


def test_tool_calls_and_their_results_are_appended(make_setup: MakeSetup, recorded: Path) -> None:
    found = replay(make_setup("full"), recorded, ["1200"], "keydiff", limit=2)
    assert len([record for record in found if record["recording"] == "runs 2"]) == 2


def test_a_recording_is_truncated_before_the_turn_that_does_not_fit(make_setup: MakeSetup) -> None:
    tokenizer = harness.load(make_setup("full").model).tokenizer
    messages = generate_topics(4, 500, 3, 4).messages()
    turns = fidelity.fit_turns(messages, tokenizer, 300)
    kept = [message for turn in turns for message in turn]
    assert kept == messages[: len(kept)]
    assert 100 < harness.count_tokens(tokenizer, kept) <= 300
    assert fidelity.fit_turns(messages, tokenizer, 10) == []


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDataFile, match="no JSON file"):
        fidelity.list_places([tmp_path], None, 0)


def test_without_sources_recordings_are_generated_from_consecutive_seeds() -> None:
    places = fidelity.list_places([], 2, 7)
    assert [place.number for place in places] == [7, 8]
    first, second = (fidelity.read_messages(place, "any model", 600) for place in places)
    assert first == fidelity.read_messages(places[0], "any model", 600)
    assert first[1] != second[1]
    assert 6 < len(first[1]) < 20
