"""What the Codex CLI sends in its default configuration: each request goes on in its session."""

import json
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
PICTURE = "data:image/png;base64,iVBORw0KGgo="
FUNCTION: Json = {
    "type": "function",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
OPTIONS: Json = {
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a",
    "client_metadata": {"turn_id": "019a"},
    "reasoning": {"summary": "auto"},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [
        {**FUNCTION, "name": "exec_command"},
        {**FUNCTION, "name": "view_image"},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Tools for sub-agents.",
            "tools": [{**FUNCTION, "name": "spawn_agent"}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
}


def message(role: str, text: str) -> Json:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


async def test_a_loop_of_calls_goes_on_in_one_session(api, ask, parse_events) -> None:
    names = ("exec_command", "view_image", "multi_agent_v1__spawn_agent")
    calls = [pb.ToolCall(id=f"c{n}", name=n, arguments='{"cmd": "a"}') for n in names]
    api.worker.script = [[calls[0]], calls[1:], "done", "again"]
    said = [message("developer", "You are a coding agent."), message("user", "Go.")]
    outputs: list[str | list[Json]] = ["1", [{"type": "input_image", "image_url": PICTURE}]]
    matches, cached = [], []
    for _ in range(4):
        response = await ask(said, **OPTIONS)
        found = parse_events(response.text)
        assert found[-1][0] == "response.completed"
        assert response.headers["kvrecall-ignored"].startswith("tools[3] web_search")
        matches.append(response.headers["kvrecall-match"])
        usage = found[-1][1]["response"]["usage"]
        cached.append(usage["input_tokens_details"]["cached_tokens"])
        # Codex repeats the items that are done, and adds the outputs of their calls.
        done = [data["item"] for kind, data in found if kind == "response.output_item.done"]
        said += done
        asked = [item for item in done if item["type"] == "function_call"]
        for item, output in zip(asked, outputs, strict=False):
            said.append(
                {"type": "function_call_output", "call_id": item["call_id"], "output": output}
            )
        if not asked:
            said.append(message("user", "And now?"))
    assert matches == ["built", "continued", "continued", "continued"]
    assert cached[0] == 0
    assert sorted(cached) == cached
    assert len(set(cached)) == 4
    spawned = next(item for item in said if item.get("name") == "spawn_agent")
    assert spawned["namespace"] == "multi_agent_v1"
    assert json.loads(spawned["arguments"]) == {"cmd": "a"}


async def test_compaction_by_codex_is_a_request_without_tools(api, ask) -> None:
    api.worker.script = [[pb.ToolCall(id="c", name="exec_command", arguments="{}")], "summary"]
    said = [message("user", "Go.")]
    first = await ask(said, **{**OPTIONS, "stream": False})
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    said += [*first.json()["output"], output, message("user", "Summarize.")]
    second = await ask(said, **{**OPTIONS, "stream": False, "tools": []})
    assert second.json()["output"][0]["content"][0]["text"] == "summary"
