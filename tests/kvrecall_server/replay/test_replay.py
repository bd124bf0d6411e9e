"""Recorded conversations through a real server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.client import KvrecallClient

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "ticket_owner", "arguments": '{"ticket": "123"}'},
}
WITH_A_TOOL = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Please note that Anna's badge is R12."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "Who owns ticket 123, and what is their badge?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": '{"owner": "Anna"}'},
    {"role": "assistant", "content": "Anna's badge is R12."},
    {"role": "user", "content": "Thank you."},
]


def turn_rows(path: Path) -> list[dict[str, Any]]:
    return [row for row in json.loads(path.read_text())["results"] if "turn" in row]


def test_with_a_budget_over_the_context_nothing_differs_from_the_full_cache(
    command: Callable[..., Any], server: str, json_lines: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    recorded = json_lines({"messages": WITH_A_TOOL})
    found = command(
        *("replay", recorded, "--url", server, "--method", "snapkv", "--budget", "512"),
        *("--compare", "full", "--json", out),
    )
    assert found.exit_code == 0, found.output
    rows = turn_rows(out)
    assert [row["compared_tokens"] > 0 for row in rows] == [True, True, True, False]
    assert [row["kl_mean"] for row in rows[:3]] == pytest.approx([0, 0, 0], abs=1e-6)
    assert [row["top1_agreement"] for row in rows[:3]] == [1, 1, 1]
    assert 0 <= rows[-1]["length"] - rows[-1]["active_rows"] < 64, "all of its whole pages"
    assert all(0 < row["first_token"] < row["seconds"] for row in rows)


def test_under_a_budget_rows_are_evicted_and_promoted_in_the_pause(
    command: Callable[..., Any], server: str, json_lines: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    options = ("--budget", "64", "--repair-rows", "16", "--compare", "full", "--json", out)
    found = command("replay", json_lines({"messages": WITH_A_TOOL}), "--url", server, *options)
    assert found.exit_code == 0, found.output
    rows = turn_rows(out)
    assert max(row["active_rows"] for row in rows) <= 64
    assert rows[2]["promoted"] > 0
    assert rows[2]["evicted_rows"] > 0
    assert rows[2]["kl_mean"] > 0
    assert all(row["peak_rows"] <= row["bound_rows"] for row in rows)
    assert {"nvme", "ram"} <= set(rows[-1]["tier_bytes"])


def test_a_conversation_past_the_context_continues_in_another_session_and_is_noted(
    command: Callable[..., Any],
    server: str,
    json_lines: Callable[..., Path],
    tmp_path: Path,
    client: KvrecallClient,
) -> None:
    lines = [{"role": "system", "content": "You are a helpful assistant."}]
    for number in range(30):
        lines.append(
            {
                "role": "user",
                "content": f"Line {number}: " + "we talked about the garden and the rain. " * 3,
            }
        )
        lines.append({"role": "assistant", "content": "That sounds lovely."})
    out = tmp_path / "out.json"
    sessions_before = client.list_sessions().sessions
    found = command(
        "replay", json_lines(*lines), "--url", server, "--compare", "full", "--json", out
    )
    assert found.exit_code == 0, found.output
    rows = turn_rows(out)
    assert len(rows) == 30
    parts = max(row["part"] for row in rows)
    assert parts > 1
    assert f"replayed as {parts} sessions" in found.output
    assert client.list_sessions().sessions == sessions_before


def test_a_text_longer_than_the_context_is_truncated_and_noted(
    command: Callable[..., Any], server: str, json_lines: Callable[..., Path]
) -> None:
    endless = {"role": "user", "content": "we talked about the garden " * 1500}
    found = command("replay", json_lines(endless), "--url", server, "--method", "full")
    assert found.exit_code == 0, found.output
    assert "characters truncated" in found.output


def test_a_server_that_is_not_there_ends_in_one_line(
    command: Callable[..., Any], json_lines: Callable[..., Path]
) -> None:
    found = command("replay", json_lines({"messages": WITH_A_TOOL}), "--url", "http://127.0.0.1:9")
    assert found.exit_code == 2
    assert "no kvrecall service is ready" in found.output
    assert "Traceback" not in found.output
