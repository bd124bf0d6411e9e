"""The page on compatibility names every member, part, block and tool of the vendors' SDKs."""

import re
import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import ContentBlockParam, ToolResultBlockParam, ToolUnionParam, beta
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMembers
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionToolUnionParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from gateway.anthropic.block_texts import TREATMENTS
from tests.gateway.vendor_types import get_types

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
RESULTS = (
    typing.get_type_hints(ToolResultBlockParam)["content"],
    typing.get_type_hints(beta.BetaToolResultBlockParam)["content"],
)


def read_names(section: str) -> set[str]:
    """All names that a section of the page has as code."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`([\w.]+)`", text))


@pytest.mark.parametrize(
    ("section", "params"),
    [
        ("Chat completions", CompletionCreateParamsBase),
        ("Messages", MessageCreateParamsBase),
        ("Messages", BetaMembers),
    ],
)
def test_every_member_is_named(section: str, params: Any) -> None:
    names = {name.split(".")[0] for name in read_names(section)}
    assert params.__annotations__.keys() - names <= set()


@pytest.mark.parametrize(
    ("section", "union"),
    [
        ("Chat completions", ChatCompletionContentPartParam),
        ("Chat completions", ChatCompletionToolUnionParam),
        *[("Messages", union) for union in (ContentBlockParam, *RESULTS, ToolUnionParam)],
        ("Messages", beta.BetaContentBlockParam),
        ("Messages", beta.BetaToolUnionParam),
    ],
)
def test_every_type_is_named(section: str, union: Any) -> None:
    types = {re.sub(r"_\d{8}$", "", kind) for kind in get_types(union)}
    assert types - read_names(section) <= {"function"}


def test_every_block_has_a_row() -> None:
    known = {*TREATMENTS, "tool_use", "tool_result"}
    for union in (ContentBlockParam, beta.BetaContentBlockParam, *RESULTS):
        assert get_types(union) <= known
