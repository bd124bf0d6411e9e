"""SWE-agent's format: steps of thought, action and observation, after the task. Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

# The tool that every recorded action is a call of: an action is a line of a shell.
_TOOL = "bash"


def to_messages(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The task as the user's message, then each step as a tool call with its result.

    Raises KeyError for a step without an action.
    """
    tasks = (each.get("content") for each in entry["history"] if each.get("role") == "user")
    yield {"role": "user", "content": next(tasks, "")}
    for number, step in enumerate(entry["trajectory"]):
        identity = f"step_{number}"
        arguments = json.dumps({"command": step["action"].strip()}, ensure_ascii=False)
        function = {"name": _TOOL, "arguments": arguments}
        call = {"id": identity, "type": "function", "function": function}
        thought = str(step.get("thought") or "").strip()
        yield {"role": "assistant", "content": thought, "tool_calls": [call]}
        observation = str(step.get("observation") or "")
        yield {"role": "tool", "tool_call_id": identity, "content": observation}
