"""`kvrecall size`: what a model and its sessions take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_the_needs_of_a_model_are_printed_as_a_table_and_as_json(
    command: Callable[..., Any],
) -> None:
    load = ("--sessions", 20, "--tokens", 2000, "--at-once", 5)
    arguments = ("--model", "reference", "--slots", 2, *load)
    found = json.loads(command("size", "--json", *arguments).stdout)
    table = command("size", *arguments).stdout
    assert [need["count"] for need in found["needs"]] == [1, 2, 2, 20, 20]
    for need in found["needs"]:
        assert need["what"] in table
        assert need["total_bytes"] >= need["each_bytes"] * need["count"] > 0
    assert f"--ram {-(-found['ram_bytes'] >> 20)} (MiB)" in table
    assert found["workers"] == 3
    assert "5 sessions with a turn at once: 3 workers of 2 slots, 3 devices with " in table
    assert len(table.splitlines()) < 24, "it fits on a screen"


def test_places_are_those_of_the_settings_and_a_large_catalog_names_its_limit(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_STORE__REDIS_URL", "redis://rows:6379")
    monkeypatch.setenv("KVRECALL_CATALOG_URL", "redis://catalog:6379")
    monkeypatch.setenv("KVRECALL_SERVICE__TENANT_CATALOG_BYTES", str(1 << 21))
    table = command("size", "--model", "reference", "--sessions", 20).stdout
    places = [line.rpartition("  ")[2] for line in table.splitlines() if "of a session  " in line]
    assert places == ["files of the workers", "Redis", "Redis of the catalog"]
    assert "one tenant may have 2.0 MiB of the catalog" in table
    assert "one tenant" not in command("size", "--model", "reference", "--sessions", 1).stdout


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
