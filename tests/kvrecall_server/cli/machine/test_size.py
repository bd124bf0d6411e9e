"""`kvrecall size`: what a model and its sessions take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_the_needs_of_a_model_are_printed_as_a_table_and_as_json(
    command: Callable[..., Any],
) -> None:
    arguments = ("--model", "reference", "--sessions", 20, "--tokens", 2000, "--slots", 2)
    found = json.loads(command("size", "--json", *arguments).stdout)
    table = command("size", *arguments).stdout
    assert [need["count"] for need in found["needs"]] == [1, 2, 2, 20]
    for need in found["needs"]:
        assert need["what"] in table
        assert need["total_bytes"] >= need["each_bytes"] * need["count"] > 0
    assert f"--ram {-(-found['ram_bytes'] >> 20)} (MiB)" in table


def test_the_part_of_each_rank_is_printed(command: Callable[..., Any]) -> None:
    arguments = ("--model", "reference", "--slots", 2)
    found = [
        json.loads(command("size", "--json", *arguments, "--tensor-parallel", ranks).stdout)
        for ranks in (1, 2)
    ]
    whole, parts = (each["needs"][0] for each in found)
    assert (whole["count"], parts["count"]) == (1, 2)
    assert parts["each_bytes"] < whole["each_bytes"]
    assert "ranks" in parts["where"]
    refused = command("size", *arguments, "--tensor-parallel", 5)
    assert (refused.exit_code, "choose another --tensor-parallel" in refused.stderr) == (2, True)


def test_more_shared_tokens_than_a_session_has_are_refused(command: Callable[..., Any]) -> None:
    found = command("size", "--model", "reference", "--tokens", 10, "--shared", 11)
    assert found.exit_code == 2
    assert "--shared is 11 tokens, at most the 10 of a session" in found.stderr


def test_a_folder_that_is_no_model_is_refused(command: Callable[..., Any], tmp_path: Path) -> None:
    found = command("size", "--model", tmp_path)
    assert found.exit_code == 2
    assert str(tmp_path) in found.stderr
