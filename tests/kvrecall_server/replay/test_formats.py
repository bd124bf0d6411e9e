"""Formats of recorded conversations, and refused files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall_server.app.errors import BadReplayFile
from kvrecall_server.replay.formats import read_recordings

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "find", "arguments": '{"what": "keys"}'},
}


def written(folder: Path, content: Any) -> Path:
    path = folder / "input.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_locomo_speakers_become_user_and_assistant_with_the_dates_in_the_users_text(
    tmp_path: Path,
) -> None:
    conversation = {
        "speaker_a": "Ada",
        "speaker_b": "Bo",
        "session_10_date_time": "noon, 2 May",
        "session_10": [{"speaker": "Bo", "text": "Late?"}, {"speaker": "Ada", "text": "No."}],
        "session_2_date_time": "noon, 1 May",
        "session_2": [
            {"speaker": "Ada", "text": "Hi Bo."},
            {"speaker": "Ada", "text": "How are you?"},
            {"speaker": "Bo", "text": "Well."},
        ],
    }
    (recording,) = read_recordings(
        written(tmp_path, {"conversation": conversation, "sample_id": "x", "qa": []})
    )
    assert recording.name == "x"
    assert [(m["role"], m["content"]) for m in recording.messages[1:]] == [
        ("user", "(noon, 1 May) Hi Bo. How are you?"),
        ("assistant", "Well."),
        ("user", "(noon, 2 May)"),
        ("assistant", "Late?"),
        ("user", "No."),
    ]


def test_actions_of_a_swe_agent_are_tool_calls_and_observations_their_results(
    tmp_path: Path,
) -> None:
    history = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Fix it."}]
    step = {"thought": "Look first.\n", "action": "ls\n", "observation": "a.py", "response": "?"}
    silent = {"thought": None, "action": "submit", "observation": None}
    (recording,) = read_recordings(
        written(tmp_path, {"history": history, "trajectory": [step, silent]})
    )
    roles = [message["role"] for message in recording.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    assert recording.messages[0]["content"] == "Fix it."
    call = recording.messages[1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"command": "ls"}
    assert recording.messages[1]["content"] == "Look first."
    assert recording.messages[2] == {
        "role": "tool",
        "content": "a.py",
        "tool_call_id": call["id"],
    }
    assert recording.messages[4]["content"] == ""


def test_a_swe_agent_run_without_steps_is_its_history(tmp_path: Path) -> None:
    history = [{"role": "user", "content": "Fix it."}, {"role": "assistant", "content": "Done."}]
    (recording,) = read_recordings(written(tmp_path, {"history": history}))
    assert [message["content"] for message in recording.messages] == ["Fix it.", "Done."]


def test_results_in_a_history_of_a_swe_agent_name_their_calls_in_a_list(tmp_path: Path) -> None:
    history = [
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "found", "tool_call_ids": ["c1"]},
    ]
    (recording,) = read_recordings(written(tmp_path, {"history": history}))
    assert recording.messages[2]["tool_call_id"] == "c1"


def test_a_step_without_an_action_is_refused(tmp_path: Path) -> None:
    broken = {"history": [{"role": "user", "content": "Fix it."}], "trajectory": [{}]}
    with pytest.raises(BadReplayFile, match="step without an action"):
        read_recordings(written(tmp_path, broken))


def test_tau_bench_runs_keep_their_tool_calls_and_results(tmp_path: Path) -> None:
    trajectory = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "here"},
        {"role": "assistant", "content": "Here."},
    ]
    runs = [{"task_id": 3, "trial": 1, "reward": 0.0, "traj": trajectory}] * 2
    recordings = read_recordings(written(tmp_path, runs))
    assert [recording.name for recording in recordings] == ["task 3 trial 1"] * 2
    assert recordings[0].messages[2]["tool_calls"] == [CALL]
    assert recordings[0].messages[3] == {"role": "tool", "content": "here", "tool_call_id": "c1"}


def test_json_lines_hold_one_message_each_or_one_conversation_each(
    json_lines: Callable[..., Path],
) -> None:
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    (one,) = read_recordings(json_lines(*messages))
    assert [message["content"] for message in one.messages] == ["Hi.", "Hello."]
    tool = {"type": "function", "function": {"name": "find"}}
    two = read_recordings(
        json_lines({"messages": messages, "tools": [tool]}, {"messages": messages, "id": "second"})
    )
    assert two[0].tools == (tool,)
    assert two[1].name == "second"


def test_contents_in_parts_and_the_developer_role_are_understood(
    json_lines: Callable[..., Path],
) -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "b"},
    ]
    (recording,) = read_recordings(
        json_lines(
            {"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}
        )
    )
    assert recording.messages == (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
    )


@pytest.mark.parametrize("written_by_model", ["{broken", "[1]", ""])
def test_arguments_that_are_no_object_become_one(
    json_lines: Callable[..., Path], written_by_model: str
) -> None:
    call = {"id": "c1", "function": {"name": "find", "arguments": written_by_model}}
    (recording,) = read_recordings(
        json_lines({"role": "user", "content": "?"}, assistant_with(call))
    )
    arguments = recording.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"text": written_by_model}


def assistant_with(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([{"neither": 1}], "in no format that replay reads"),
        ([[1, 2]], "entries that are not JSON objects"),
        ([{"role": "wizard", "content": "x"}], "its role is not one of"),
        ([{"role": "tool", "tool_call_id": "c9", "content": "x"}], "no preceding call 'c9'"),
        ([assistant_with({"function": {}})], "a tool call needs an id"),
        ([], "no conversation"),
    ],
)
def test_an_unknown_format_is_refused_with_the_reason(
    json_lines: Callable[..., Path], lines: list[Any], why: str
) -> None:
    with pytest.raises(BadReplayFile, match=why):
        read_recordings(json_lines(*lines))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"role": "user", "content": "a"}\n{"role": \n', encoding="utf-8")
    with pytest.raises(BadReplayFile, match="line 2 is not JSON"):
        read_recordings(path)
