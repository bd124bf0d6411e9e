"""A chat template without tools: they are written into messages that it renders."""

import json
from copy import deepcopy
from typing import Any

import pytest

from workers.model.calls.messages import write_tools
from workers.model.tokenizer import ChatTokenizer, keep_recent

PLAIN = """\
{%- if messages[0].role != 'system' %}system: You are kind.{{ eos_token }}{% endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}"""
ALTERNATES = """\
{%- for message in messages -%}
{%- if message.role != ('assistant' if loop.index0 % 2 else 'user') -%}
{{ raise_exception('user and assistant take turns') }}
{%- endif -%}
{{ message.content }}{{ eos_token }}
{%- endfor -%}"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALLS = [
    {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"n": {n}}}'}}
    for n in (1, 2)
]
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "I will look.", "tool_calls": CALLS},
    {"role": "tool", "content": "not here", "tool_call_id": "c1"},
    {"role": "tool", "content": "here", "tool_call_id": "c2"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "Thank you."},
]
WRITTEN = [
    "user: Where is it?",
    "assistant: I will look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"n": 2}}\n</tool_call>',
    "user: <tool_response>\nnot here\n</tool_response>",
    "user: <tool_response>\nhere\n</tool_response>",
    "assistant: There.",
    "user: Thank you.",
]


def make(tokenizer: ChatTokenizer, template: str) -> ChatTokenizer:
    """The reference model's tokenizer with another chat template."""
    inner = deepcopy(tokenizer.inner)
    inner.chat_template = template
    return ChatTokenizer(inner, tokenizer.eos_token_ids)


def render(tokenizer: ChatTokenizer, turns: list[list[dict[str, Any]]], tools: list[Any]) -> str:
    """The text of a conversation that is appended turn by turn, and asked for an answer."""
    token_ids: list[int] = []
    recent: list[dict[str, Any]] = []
    for number, new in enumerate(turns, 1):
        for segment in tokenizer.prompt(recent, new, tools, generate=number == len(turns)):
            token_ids += segment.token_ids
        recent = keep_recent([*recent, *new])
    return str(tokenizer.inner.decode(token_ids))


@pytest.mark.parametrize("opening", [[], [SYSTEM]], ids=["no system message", "system"])
def test_a_conversation_with_tools_is_rendered_alike_in_any_turns(
    opening: list[dict[str, Any]], tokenizer: ChatTokenizer
) -> None:
    plain = make(tokenizer, PLAIN)
    assert (plain.format.name, plain.writes_tools) == ("hermes", True)
    messages = [*opening, *CONVERSATION]
    whole = render(plain, [messages], [TOOL])
    assert render(plain, [[each] for each in messages], [TOOL]) == whole
    eos = str(plain.inner.eos_token)
    system, *others, answer = whole.split(eos)
    assert others == WRITTEN
    assert answer == "assistant: "
    begin = "system: Be brief.\n\n# Tools\n" if opening else "system: # Tools\n"
    assert system.startswith(begin)
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in system


def test_without_tools_a_conversation_is_as_the_template_has_it(tokenizer: ChatTokenizer) -> None:
    plain = make(tokenizer, PLAIN)
    messages = [CONVERSATION[0], CONVERSATION[4], CONVERSATION[5]]
    eos = plain.inner.eos_token
    said = ["system: You are kind.", WRITTEN[0], WRITTEN[4], WRITTEN[5], "assistant: "]
    assert render(plain, [messages], []) == str(eos).join(said)


@pytest.mark.parametrize(
    "template", [ALTERNATES, PLAIN + "{% if tools %}{{ tools | tojson }}{% endif %}", "nothing"]
)
def test_a_template_that_has_tools_or_cannot_render_them_is_left_alone(
    template: str, tokenizer: ChatTokenizer
) -> None:
    other = make(tokenizer, template)
    assert (other.format.mark, other.writes_tools) == ("", False)


def test_a_call_without_text_is_the_whole_message() -> None:
    function = {"name": "look", "arguments": {}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert write_tools([call], []) == [{"role": "assistant", "content": text}]
