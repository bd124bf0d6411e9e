"""The scripted model of the agents' lab: does what the user's last prompt says, with the agent's tools.

Prompts have a fixed form, as agents put text of their own around them:

- `Please run [cat note.txt] and [cat other.txt].`: calls of the shell, in parallel.
- `Please look at [picture.png].`: a call of the tool that shows images, or that reads files.
- `Please delegate [My name is Ada. What is my name?].`: a call of the tool that starts a subagent.
- All else, also what an agent asks on its own, as a summary: the user's name, if any message has it.

After the results of its calls it repeats them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb

_NAME = re.compile(r"[Nn]ame is ([A-Z]\w+)")
_PROMPT = re.compile(
    r"Please (run|look at|delegate) (\[.+?\](?: and \[.+?\])*)\.|What is my name\?|My name is "
)
# Subagents that run in the background are told of in a later message of the user's.
_NOTICE = re.compile(r"<result>(.*?)</result>", re.DOTALL)
# Those that have to be waited for are told of by an id.
_STARTED = re.compile(r'"agent_id":\s*"([^"]+)"')
_WAIT = "wait_agent"
# Parameters that say which kind of subagent: the first of these of which the tool's text tells.
_KINDS = ("general-purpose", "general", "coder", "default")
_PART = re.compile(r"\[(.+?)\]")
_SUMMARY = re.compile("summar|compact|handoff", re.IGNORECASE)
_PROMPT_CHARACTERS = 300
_SHOWN_CHARACTERS = 600
# By preference: the first of these that the agent offers is called.
_TOOLS = {
    "run": (
        "exec_command",
        "bash",
        "shell",
        "run_shell_command",
        "run_commands",
        "execute_command",
    ),
    "look at": ("view_image", "readmediafile", "read", "read_file", "read_files"),
    "delegate": ("task", "agent", "spawn_agent", "subagent", "new_task", "spawn_agents"),
}
# Parameters that take the part of the prompt in brackets; all other required ones are filled.
_SUBJECTS = {
    "run": ("command", "cmd", "commands"),
    "look at": ("path", "file_path", "filepath", "absolute_path", "files"),
    "delegate": ("prompt", "message", "task", "targets"),
}

Reply = str | list[pb.ToolCall]


def answer(messages: Sequence[pb.Message], tools: Sequence[str]) -> Reply:
    """Answer the last prompt: with calls, or with their results."""
    named = [name for message in messages for name in _NAME.findall(message.content)]
    at, prompt = _find_prompt(messages)
    if messages[-1].role == "user" and _asks_summary(messages[-1].content):
        prompt = None
    if prompt is None or prompt[1] is None:
        return f"Your name is {named[-1]}." if named else "Nobody told me a name."
    functions = [json.loads(tool)["function"] for tool in tools]
    # The functions of a namespace have its name before theirs.
    known = {str(each["name"]).lower().rpartition("__")[2]: each for each in functions}
    results = _read_results(messages[at + 1 :])
    started = _STARTED.search(results[-1]) if results else None
    if started and _WAIT in known:
        return [_call(known[_WAIT], "delegate", started[1], f"{len(messages)}")]
    if results:
        shown = " | ".join(result[: _SHOWN_CHARACTERS // len(results)] for result in results)
        return f"The results are: {shown}"
    function = next((known[name] for name in _TOOLS[prompt[1]] if name in known), None)
    if function is None:
        return f"There is no tool to {prompt[1]} anything."
    parts = enumerate(_PART.findall(prompt[2]))
    return [_call(function, prompt[1], part, f"{len(messages)}_{at}") for at, part in parts]


def _asks_summary(text: str) -> bool:
    """Whether a message of the user's is the agent's own, when it compacts; it may quote prompts."""
    at_end = _PROMPT.search(text[-_PROMPT_CHARACTERS:])
    return not at_end and not _NOTICE.search(text) and _SUMMARY.search(text) is not None


def _read_results(messages: Sequence[pb.Message]) -> list[str]:
    """Return the results of the prompt's calls; of subagents' notices the results in them."""
    notices = [text for message in messages for text in _NOTICE.findall(message.content)]
    return notices or [message.content for message in messages if message.role == "tool"]


def _find_prompt(messages: Sequence[pb.Message]) -> tuple[int, re.Match[str] | None]:
    """Find the last prompt of a known form, and the place of its message."""
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].role == "user":
            found = list(_PROMPT.finditer(messages[at].content))
            if found:
                return at, found[-1]
    return 0, None


def _call(function: Mapping[str, Any], kind: str, part: str, number: str) -> pb.ToolCall:
    arguments = json.dumps(_fill(function, kind, part))
    return pb.ToolCall(id=f"call_{number}", name=function["name"], arguments=arguments)


def _fill(function: Mapping[str, Any], kind: str, part: str) -> dict[str, Any]:
    """Fill the required parameters, and the one that takes the part, as their schema wants them."""
    schema = function.get("parameters", {})
    properties: Mapping[str, Mapping[str, Any]] = schema.get("properties", {})
    subject = next((name for name in properties if name.lower() in _SUBJECTS[kind]), None)
    known = function.get("description", "") + json.dumps(schema)
    agent = next((each for each in _KINDS if each in known), "A step.")
    texts = {name: agent for name in properties if name.endswith("_type")}
    texts |= {subject: part} if subject else {}
    return {
        name: _value(each, texts.get(name, "A step."))
        for name, each in properties.items()
        if name in (*schema.get("required", ()), subject)
    }


def _value(schema: Mapping[str, Any], text: str) -> Any:
    """Return a value of the schema: the text, where it can have one."""
    if schema.get("enum"):
        return schema["enum"][0]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _value(options[0], text)
    match schema.get("type"):
        case "boolean":
            return False
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "array":
            return [_value(schema.get("items", {}), text)]
        case "object":
            properties = schema.get("properties", {})
            return {
                name: _value(each, text)
                for name, each in properties.items()
                if name in schema.get("required", ())
            }
        case _:
            return text
