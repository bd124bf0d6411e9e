"""Items of a history that only OpenAI's service makes: what the model is told of them.

A call that was run there comes with what it gave, so it is told as text within the answer, and no
call of the client's waits for it. What tells the model nothing is left out.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict

from gateway.conversation_bodies import Wire
from gateway.openai.responses.compaction import tell_compaction
from kvrecall.domain.messages import Message

Json = dict[str, Any]

SETTING_ITEMS = frozenset({"additional_tools", "configuration_update"})
"""Types of items that are read before the turn (`ResponseBody`), and say nothing."""

LEFT_OUT_ITEMS = frozenset({"mcp_approval_request", "mcp_approval_response", "mcp_list_tools"})
"""Types of items that have no effect."""

_SCREENSHOT = "[a screenshot, which this model cannot see]"


class HostedItem(Wire):
    """Item that no client makes by itself; its members are kept to be told."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def message(self) -> Message | None:
        """What the model is told; None for an item that is left out."""
        tell = _TELLERS.get(self.type)
        return None if tell is None else tell(self.type, self.model_extra or {})


def _tell(*names: str) -> Callable[[str, Json], Message]:
    """Return the function that tells these members of a call that was run."""

    def tell(kind: str, item: Json) -> Message:
        found = {name: item[name] for name in names if item.get(name)}
        text = json.dumps(found, ensure_ascii=False)
        return Message("assistant", f"[{kind} {text}]\n")

    return tell


def _tell_code(kind: str, item: Json) -> Message:
    outputs = item.get("outputs") or ()
    logs = [str(each["logs"]) for each in outputs if isinstance(each, dict) and each.get("logs")]
    return _tell("code", "logs")(kind, {"code": item.get("code"), "logs": "\n".join(logs)})


def _tell_screenshot(kind: str, item: Json) -> Message:
    return Message("user", _SCREENSHOT)


def _tell_compaction(kind: str, item: Json) -> Message:
    return tell_compaction(item.get("encrypted_content"))


def _tell_agent(kind: str, item: Json) -> Message:
    """Tell what another agent said, as Codex passes it on."""
    parts = item.get("content") or ()
    texts = [part.get("text") or "" for part in parts if isinstance(part, dict)]
    return Message("user", f"Message from {item.get('author')}: {''.join(texts)}")


_TELLERS: Mapping[str, Callable[[str, Json], Message]] = {
    "agent_message": _tell_agent,
    "code_interpreter_call": _tell_code,
    "compaction": _tell_compaction,
    "compaction_summary": _tell_compaction,
    "computer_call": _tell("action", "actions"),
    "computer_call_output": _tell_screenshot,
    "file_search_call": _tell("queries", "results"),
    "image_generation_call": _tell("revised_prompt"),
    "mcp_call": _tell("server_label", "name", "arguments", "output", "error"),
    "program": _tell("code"),
    "program_output": _tell("result"),
    "web_search_call": _tell("action"),
}

HOSTED_ITEMS = SETTING_ITEMS | LEFT_OUT_ITEMS | _TELLERS.keys()
"""Types of all items that no client makes by itself."""
