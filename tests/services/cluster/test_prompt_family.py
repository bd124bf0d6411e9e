"""What sessions of one prompt family have in common, and what tells families apart."""

from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.messages import Message
from kvrecall.domain.settings.session import SessionSettings
from services.cluster.prompt_family import prompt_family

SETTINGS = SessionSettings(budget=64, repair_rows=8, method="snapkv", tenant="ann")
SYSTEM = Message("system", "you help people")
RULES = Message("system", "be brief")
ANN = Message("user", "my name is ann")
BEN = Message("user", "my name is ben")
TOOL = '{"type": "function", "function": {"name": "weather"}}'


def family(*messages: Message, **settings: Any) -> str:
    return prompt_family(replace(SETTINGS, **settings), messages)


def test_conversations_of_one_agent_are_a_family() -> None:
    assert family(SYSTEM, ANN) == family(SYSTEM, BEN) == family(SYSTEM, BEN, SYSTEM)


@pytest.mark.parametrize(
    ("messages", "settings"),
    [
        ((SYSTEM, ANN), {"tenant": "ben"}),
        ((SYSTEM, ANN), {"tools": (TOOL,)}),
        ((SYSTEM, RULES, ANN), {}),
        ((RULES, ANN), {}),
        ((replace(SYSTEM, name="clock"), ANN), {}),
    ],
)
def test_other_tenants_tools_and_system_messages_are_other_families(
    messages: tuple[Message, ...], settings: dict[str, Any]
) -> None:
    assert family(*messages, **settings) != family(SYSTEM, ANN)


def test_settings_of_the_session_are_no_part_of_it() -> None:
    assert family(SYSTEM, ANN, budget=None, method="full", seed=7) == family(SYSTEM, ANN)


def test_tools_alone_are_a_family() -> None:
    assert family(ANN, tools=(TOOL,)) == family(BEN, tools=(TOOL,)) != ""


def test_without_tools_and_leading_system_messages_there_is_none() -> None:
    assert family(ANN, SYSTEM) == family() == ""
