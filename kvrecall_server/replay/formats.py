"""Recorded conversations from files: LoCoMo, tau-bench, SWE-agent, OpenAI-style JSON lines.

The format is detected from the content, not from the file's name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrecall_server.app.errors import BadReplayFile
from kvrecall_server.replay import swe_agent
from kvrecall_server.replay.locomo import to_messages
from kvrecall_server.replay.recording import Message, Recording

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
FORMATS = (
    "a LoCoMo file, a tau-bench file of runs, a SWE-agent trajectory, "
    "or JSON lines of OpenAI-style messages"
)


def read_recordings(path: Path) -> list[Recording]:
    """All conversations of a file, in its order. Raises BadReplayFile."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadReplayFile(f"{path} cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        content = _json_lines(path, text)
    recordings = _recordings(path, content)
    if not recordings:
        raise BadReplayFile(f"{path} has no conversation in it")
    return recordings


def _json_lines(path: Path, text: str) -> list[Any]:
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise BadReplayFile(
                    f"{path} line {number} is not JSON: {error}; replay reads {FORMATS}"
                ) from error
    return lines


def _recordings(path: Path, content: Any) -> list[Recording]:
    entries = content if isinstance(content, list) else [content]
    if not all(isinstance(entry, dict) for entry in entries):
        raise BadReplayFile(f"{path} has entries that are not JSON objects; replay reads {FORMATS}")
    if all("conversation" in entry for entry in entries):
        return [_locomo(path, entry) for entry in entries]
    if all("traj" in entry for entry in entries):
        return [_tau_bench(path, entry) for entry in entries]
    if all("history" in entry for entry in entries):
        return [_swe_agent(path, entry) for entry in entries]
    if all("messages" in entry for entry in entries):
        return [_with_messages(path, index, entry) for index, entry in enumerate(entries)]
    if entries and all("role" in entry for entry in entries):
        return [Recording(path.stem, _messages(path.name, entries))]
    raise BadReplayFile(f"{path} is in no format that replay reads: {FORMATS}")


def _locomo(path: Path, entry: Mapping[str, Any]) -> Recording:
    conversation = entry["conversation"]
    if not isinstance(conversation, dict) or "speaker_a" not in conversation:
        raise BadReplayFile(f"{path}: conversation has no speaker_a; replay reads {FORMATS}")
    first = conversation["speaker_a"]
    second = conversation.get("speaker_b", "")
    messages: list[Message] = [
        {"role": "system", "content": f"A conversation of {first} and {second}."}
    ]
    messages += [
        {"role": message.role, "content": message.content} for message in to_messages(conversation)
    ]
    return Recording(str(entry.get("sample_id", path.stem)), tuple(messages))


def _tau_bench(path: Path, entry: Mapping[str, Any]) -> Recording:
    name = f"task {entry.get('task_id', '?')} trial {entry.get('trial', '?')}"
    return Recording(name, _messages(f"{path.name}, {name}", entry["traj"]))


def _swe_agent(path: Path, entry: Mapping[str, Any]) -> Recording:
    if "trajectory" not in entry:
        return Recording(path.stem, _messages(path.name, entry["history"]))
    try:
        messages = list(swe_agent.to_messages(entry))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadReplayFile(f"{path} has a step without an action: {error!r}") from error
    return Recording(path.stem, _messages(path.name, messages))


def _with_messages(path: Path, index: int, entry: Mapping[str, Any]) -> Recording:
    name = str(entry.get("id") or entry.get("name") or f"{path.stem} {index + 1}")
    return Recording(
        name, _messages(f"{path.name}, {name}", entry["messages"]), tuple(entry.get("tools") or ())
    )


def _messages(where: str, entries: Any) -> tuple[Message, ...]:
    """Messages as the HTTP API takes them; a tool result must have a preceding call.

    Raises BadReplayFile.
    """
    if not isinstance(entries, list) or not entries:
        raise BadReplayFile(f"{where}: a conversation is a list of messages")
    called: set[str] = set()
    messages = []
    for index, entry in enumerate(entries):
        message = _message(f"{where}, message {index + 1}", entry)
        called |= {call["id"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            raise BadReplayFile(
                f"{where}, message {index + 1}: "
                f"it has no preceding call {message['tool_call_id']!r}"
            )
        messages.append(message)
    return tuple(messages)


def _message(where: str, entry: Any) -> Message:
    role = _ROLES.get(entry.get("role", "")) if isinstance(entry, dict) else None
    if role is None:
        raise BadReplayFile(f"{where}: its role is not one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": role, "content": _text(entry.get("content"))}
    if role == "tool":
        # Histories of SWE-agent have a list.
        ids = entry.get("tool_call_ids") or [entry.get("tool_call_id", "")]
        message["tool_call_id"] = str(ids[0])
    if role == "assistant" and entry.get("tool_calls"):
        message["tool_calls"] = [_call(where, call) for call in entry["tool_calls"]]
    return message


def _call(where: str, call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        identity = str(call["id"])
        name = str(function["name"])
        arguments = function.get("arguments")
    except (KeyError, TypeError, AttributeError) as error:
        raise BadReplayFile(
            f"{where}: a tool call needs an id and a function with a name"
        ) from error
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": _arguments(arguments)},
    }


def _arguments(recorded: Any) -> str:
    """Arguments as the JSON text of an object; a recorded model may have written anything."""
    if not isinstance(recorded, str):
        return json.dumps(recorded if isinstance(recorded, dict) else {}, ensure_ascii=False)
    try:
        well_formed = isinstance(json.loads(recorded), dict)
    except json.JSONDecodeError:
        well_formed = False
    return recorded if well_formed else json.dumps({"text": recorded}, ensure_ascii=False)


def _text(content: Any) -> str:
    """Text of a message's content; of content parts, the text parts joined by line ends."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part["text"]) for part in content if isinstance(part, dict) and "text" in part
        )
    return json.dumps(content, ensure_ascii=False)
