"""`kvrecall config`: values, and what has set them."""

import json
from collections.abc import Callable
from typing import Any

import pytest


def test_every_setting_names_what_has_set_it(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_WORKER__SLOTS", "3")
    monkeypatch.setenv("KVRECALL_SERVICE", '{"pause_seconds": 5}')
    monkeypatch.setenv("KVRECALL_PORT", "9001")
    found = command("config", "--port", 9002, "--ram", 2, "--json")
    settings = {each["variable"]: each for each in json.loads(found.output)}
    shown = {
        name: (settings[name]["value"], settings[name]["set_by"])
        for name in (
            "KVRECALL_WORKER__SLOTS",
            "KVRECALL_SERVICE__PAUSE_SECONDS",
            "KVRECALL_PORT",
            "KVRECALL_RAM_BYTES",
            "KVRECALL_HOST",
        )
    }
    assert shown == {
        "KVRECALL_WORKER__SLOTS": (3, "environment"),
        "KVRECALL_SERVICE__PAUSE_SECONDS": (5.0, "environment"),
        "KVRECALL_PORT": (9002, "flag"),
        "KVRECALL_RAM_BYTES": (2 << 20, "flag"),
        "KVRECALL_HOST": ("127.0.0.1", "default"),
    }


def test_a_line_can_be_put_into_the_environment(command: Callable[..., Any]) -> None:
    lines = command("config", "--slots", 7).output.splitlines()
    assert "KVRECALL_WORKER__SLOTS=7  # flag" in lines
    assert "KVRECALL_PORT=8420  # default" in lines


def test_secrets_are_not_shown(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_WIRE__TOKEN", "hush-hush-hush-hush")
    monkeypatch.setenv("KVRECALL_CATALOG_URL", "redis://user:hush@host:6379/0")
    for arguments in ((), ("--json",)):
        output = command("config", "--api-key", "hush-hush", *arguments).output
        assert "hush" not in output
        assert output.count("(hidden)") == 3


def test_help_names_the_default_and_the_variable_of_each_flag(command: Callable[..., Any]) -> None:
    for name in ("serve", "worker", "gateway", "config"):
        shown = command(name, "-h").output
        for line in shown.split("│ --")[1:]:
            if line.startswith(("help", "json")):
                continue
            text = " ".join(line.replace("│", " ").split())
            assert "KVRECALL_" in text, text
            assert "Default: " in text or "tls-key" in text, text
        assert "<bool>" not in shown
