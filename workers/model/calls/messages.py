"""Tool calls for models whose chat template has none: written into plain messages, in Hermes' form.

The tools are behind the system message, calls in the assistant's text, results in a user's message:
roles and contents that every template renders. One result is one message, so that a message is
rendered alike whatever follows.
"""

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

ChatMessage = dict[str, Any]

_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
# A conversation that every template has to render where messages are written by this module.
_TOOL = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
_CALL: dict[str, Any] = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "probe", "arguments": {"of": "the call"}},
}
_PROBE: tuple[ChatMessage, ...] = (
    {"role": "system", "content": "the system"},
    {"role": "user", "content": "the question"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]},
    {"role": "tool", "tool_call_id": "probe0000", "content": "the first result"},
    {"role": "tool", "tool_call_id": "probe0000", "content": "the second result"},
    {"role": "assistant", "content": "the answer"},
    {"role": "user", "content": "another question"},
)
_PROBED = ("the system", '"probe"', "the call", "the first result", "the second result")


def can_write_tools(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Check if a chat template knows nothing of tools, and renders them where they are written here."""
    template = str(tokenizer.chat_template or "")
    if "tools" in template or "tool_calls" in template:
        return False
    return _renders(tokenizer, write_tools(_PROBE, [_TOOL]), _PROBED)


def takes_text_arguments(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Check if a chat template renders the arguments of calls as JSON text, and not as objects."""
    if "tool_calls" not in str(tokenizer.chat_template or ""):
        return False
    call = {**_CALL["function"], "arguments": '{"of": "the call"}'}
    texts = [{**message} for message in _PROBE]
    texts[2]["tool_calls"] = [{**_CALL, "function": call}]
    objects = [{**message} for message in _PROBE]
    objects[2]["tool_calls"] = [_CALL]
    # The first two results are of two calls; here there is one.
    del texts[4], objects[4]
    return not _renders(tokenizer, objects, ()) and _renders(tokenizer, texts, ("the call",))


def _renders(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[ChatMessage], parts: Sequence[str]
) -> bool:
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError):
        return False
    return all(part in text for part in parts)


def write_tools(messages: Sequence[ChatMessage], tools: Sequence[Any]) -> list[ChatMessage]:
    """Return messages of the roles system, user and assistant, which have a content alone.

    Messages are as templates take them: arguments are objects, contents are strings.
    """
    written = [_write(message) for message in messages]
    if not tools:
        return written
    text = _TOOLS.format(tools="\n".join(_to_json(tool) for tool in tools))
    if written and written[0]["role"] == "system":
        content = f"{written[0]['content']}\n\n{text}".lstrip()
        return [{**written[0], "content": content}, *written[1:]]
    return [{"role": "system", "content": text}, *written]


def split_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Put each call into a message of its own, behind one with the text.

    A template of channels renders the first call only, and leaves out the text before it once the
    conversation has gone on.
    """
    split: list[ChatMessage] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message.get("content") or not calls:
            split.append({key: value for key, value in message.items() if key != "tool_calls"})
        apart = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls]
        if apart and not message.get("content") and message.get("reasoning"):
            apart[0]["reasoning"] = message["reasoning"]
        split += apart
    return split


def _write(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls") or ()
    texts = [f"<tool_call>\n{_to_json(_get_call(call))}\n</tool_call>" for call in calls]
    before = [message["content"]] if message["content"] or not calls else []
    return {"role": message["role"], "content": "\n".join([*before, *texts])}


def _get_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function["arguments"]}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


FRAME = "".join(str(message["content"]) for message in write_tools(_PROBE, [_TOOL]))
"""What is written around tools, calls and results."""
