"""What Claude Code sends: members, blocks and tools that are left out, offered or read."""

from typing import Any

import httpx
import pytest
from anthropic.types import ToolUnionParam, beta

from gateway.anthropic.tools import ToolWire
from gateway.conversation.ignored import IgnoredParts
from tests.gateway.vendor_types import get_types

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "hello there"}]


async def ask(api: Any, **members: Any) -> httpx.Response:
    body = {"model": api.service.info.model, "max_tokens": 9, "messages": HELLO, **members}
    response: httpx.Response = await api.http.post("/v1/messages?beta=true", json=body)
    assert response.status_code == 200, response.text
    return response


async def test_the_request_of_claude_code_is_answered_and_what_is_left_out_is_named(api) -> None:
    response = await ask(
        api,
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "ann"},
        system=[{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
        messages=[*HELLO, {"role": "system", "content": "Agent types: none."}],
    )
    named = response.headers["kvrecall-ignored"].split(", ")
    assert sorted(named) == ["context_management", "output_config.effort", "thinking"]


async def test_hosted_tools_are_left_out_and_those_of_the_client_are_offered(api) -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
        {"name": "Read", "input_schema": {"type": "object"}, "eager_input_streaming": True},
    ]
    response = await ask(api, tools=tools)
    assert response.headers["kvrecall-ignored"] == "tools[0] web_search_20250305"
    session = (await api.service.get(response.headers["kvrecall-session"]))[0]
    assert [("bash" in tool, "Read" in tool) for tool in session.settings.tools] == [
        (True, False),
        (False, True),
    ]


def test_every_tool_of_anthropics_schemas_is_offered_or_left_out() -> None:
    for kind in get_types(ToolUnionParam) | get_types(beta.BetaToolUnionParam):
        ignored = IgnoredParts()
        wire = ToolWire(type=kind, name="tool", input_schema={})
        assert (wire.to_body("tools[0]", ignored) is None) == bool(list(ignored)), kind


SOURCES: dict[str, Json] = {
    "pdf": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
    "text": {"type": "text", "media_type": "text/plain", "data": "it rains"},
    "content": {"type": "content", "content": [{"type": "text", "text": "it rains"}]},
    "url": {"type": "url", "url": "https://example.com/a.pdf"},
    "file": {"type": "file", "file_id": "file_1"},
}


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "document", "title": "W", "source": SOURCES["pdf"]}, "[document, W, applicat"),
        ({"type": "document", "title": "W", "source": SOURCES["text"]}, "W\nit rains"),
        ({"type": "document", "source": SOURCES["content"]}, "it rains"),
        ({"type": "image", "source": SOURCES["url"]}, "[image, https://example.com/a.pdf: not"),
        ({"type": "document", "source": SOURCES["file"]}, "[document, file_1: not"),
        ({"type": "container_upload", "file_id": "f"}, "[container upload, f: not"),
        (
            {
                "type": "search_result",
                "title": "W",
                "source": "a.md",
                "content": [{"type": "text", "text": "it rains"}],
            },
            "a.md\nit rains",
        ),
        ({"type": "compaction", "content": "so far"}, "so far"),
        ({"type": "tool_reference", "tool_name": "f"}, "[tool f]"),
    ],
)
async def test_blocks_say_to_the_model_what_was_there(api, block: Json, said: str) -> None:
    response = await ask(api, messages=[{"role": "user", "content": [block]}])
    (turn,) = await api.service.turns(response.headers["kvrecall-session"], 0, 1)
    assert said in turn.messages[0].content


async def test_what_a_hosted_tool_did_before_is_text(api) -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "rain"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [
                {
                    "type": "web_search_result",
                    "title": "Rain",
                    "url": "https://example.com",
                    "encrypted_content": "xyz",
                }
            ],
        },
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "It rains."},
    ]
    response = await ask(api, messages=[*HELLO, {"role": "assistant", "content": blocks}, *HELLO])
    (turn, _) = await api.service.turns(response.headers["kvrecall-session"], 0, 2)
    text = turn.messages[1].content
    assert '[called the hosted tool web_search: {"query": "rain"}]' in text
    assert "Rain\nhttps://example.com" in text
    assert "xyz" not in text
    assert text.endswith("\nIt rains.")
