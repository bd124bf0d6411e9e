"""`kvrecall methods`."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from kvrecall.domain.settings.methods import METHOD_SETTINGS
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.cli.methods import format_settings
from workers.methods import METHODS, describe, describe_prefill, describe_repair, describe_retrieval


def test_every_method_is_listed_with_its_summary_and_settings(
    command: Callable[..., Any],
) -> None:
    found = command("methods")
    assert found.exit_code == 0, found.output
    shown = " ".join(found.output.split())
    for name in METHODS:
        assert f" {name} " in shown
        assert " ".join(describe(name).summary.split()) in shown
        for field in fields(METHOD_SETTINGS[name]):
            assert f"{field.name} = {json.dumps(field.default)}" in shown


@pytest.mark.parametrize("described", [describe_repair(), describe_prefill(), describe_retrieval()])
def test_repair_prefill_and_retrieval_are_listed_with_their_settings(
    command: Callable[..., Any], described: pb.MethodInfo
) -> None:
    shown = " ".join(command("methods").output.split())
    assert " ".join(described.summary.split()) in shown
    listed = list(format_settings(described.settings_schema))
    assert listed
    assert all(line in shown for line in listed)


@pytest.mark.parametrize(
    ("about", "shown"),
    [
        ({"default": 4, "minimum": 1, "maximum": 9}, "x = 4 (1 to 9)"),
        ({"default": 0, "minimum": 0}, "x = 0 (at least 0)"),
        ({"default": "mean", "enum": ["mean", "max"]}, 'x = "mean" (mean, max)'),
        ({"default": True}, "x = true"),
    ],
)
def test_a_setting_is_shown_with_its_default_and_range(about: dict[str, Any], shown: str) -> None:
    assert list(format_settings(json.dumps({"properties": {"x": about}}))) == [shown]
