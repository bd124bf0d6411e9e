"""Items of all types: each says something, stands for nothing, or is looked up."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from gateway.conversation.ignored import IgnoredParts, Tolerance
from gateway.openai.responses.items import (
    LEFT_OUT_ITEMS,
    SETTING_ITEMS,
    PlacedItem,
    parse_item,
    to_messages,
)
from kvrecall.domain.messages import Message

Json = dict[str, Any]
# Items that only OpenAI's service makes, and what the model reads of them.
TOLD: list[tuple[Json, str]] = [
    (
        {"type": "web_search_call", "action": {"type": "search", "query": "é"}, "id": "ws"},
        '[web_search_call {"action": {"type": "search", "query": "é"}}]\n',
    ),
    (
        {"type": "file_search_call", "queries": ["a"], "results": None},
        '[file_search_call {"queries": ["a"]}]\n',
    ),
    (
        {
            "type": "code_interpreter_call",
            "code": "1+1",
            "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "data:"}],
        },
        '[code_interpreter_call {"code": "1+1", "logs": "2"}]\n',
    ),
    (
        {"type": "image_generation_call", "revised_prompt": "a cat", "result": "iVBOR"},
        '[image_generation_call {"revised_prompt": "a cat"}]\n',
    ),
    (
        {"type": "mcp_call", "server_label": "s", "name": "f", "arguments": "{}", "output": "1"},
        '[mcp_call {"server_label": "s", "name": "f", "arguments": "{}", "output": "1"}]\n',
    ),
    (
        {"type": "computer_call", "call_id": "c", "action": {"type": "wait"}},
        '[computer_call {"action": {"type": "wait"}}]\n',
    ),
    ({"type": "program", "code": "f()", "call_id": "p"}, '[program {"code": "f()"}]\n'),
    ({"type": "program_output", "result": "1"}, '[program_output {"result": "1"}]\n'),
]
SAID: list[tuple[Json, Message]] = [
    (
        {"type": "computer_call_output", "call_id": "c", "output": {"image_url": "data:"}},
        Message("user", "[a screenshot, which this model cannot see]"),
    ),
    (
        {"type": "compaction", "encrypted_content": "gAAA"},
        Message("user", "[an earlier part of the conversation, which this model cannot read]"),
    ),
    (
        {
            "type": "agent_message",
            "author": "/root/one",
            "content": [{"type": "input_text", "text": "hi"}],
        },
        Message("user", "Message from /root/one: hi"),
    ),
    *[(item, Message("assistant", text)) for item, text in TOLD],
]
PLAIN: dict[str, Json] = {
    "message": {"role": "user", "content": "a"},
    "reasoning": {"summary": [], "encrypted_content": "gAAA"},
    "function_call": {"call_id": "c", "name": "f", "arguments": "{}"},
    "function_call_output": {"call_id": "c", "output": "1"},
    "custom_tool_call": {"call_id": "c", "name": "f", "input": "x"},
    "custom_tool_call_output": {"call_id": "c", "output": "1"},
    "shell_call": {"call_id": "c", "action": {"commands": ["ls"]}},
    "shell_call_output": {"call_id": "c", "output": []},
    "local_shell_call": {"call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    "local_shell_call_output": {"id": "c", "output": "1"},
    "apply_patch_call": {"call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
    "apply_patch_call_output": {"call_id": "c", "status": "completed"},
    "tool_search_call": {"call_id": "c", "arguments": {}},
    "tool_search_output": {"call_id": "c", "tools": []},
}
LOOKED_UP = {"item_reference"}
REFUSED = {"compaction_trigger"}


def parse(item: Json) -> PlacedItem:
    return parse_item(item, "input[0]", Tolerance(True, IgnoredParts()))


def find_types(union: Any) -> Iterator[str]:
    """The types of the members of one of OpenAI's unions."""
    for member in get_args(union):
        hint = get_type_hints(member)["type"]
        arguments = [get_args(each) or (each,) for each in get_args(hint)]
        flat = [each for group in arguments for each in group]
        yield from (each for each in flat if isinstance(each, str))


def test_each_of_openais_items_has_a_treatment() -> None:
    said = PLAIN.keys() | {item["type"] for item, _ in SAID}
    silent = LEFT_OUT_ITEMS | SETTING_ITEMS
    assert set(find_types(ResponseInputItemParam)) <= said | silent | LOOKED_UP | REFUSED
    for kind in silent:
        assert to_messages([parse({"type": kind, "tools": []})]).messages == ()


@pytest.mark.parametrize(("item", "expected"), SAID)
def test_what_was_run_elsewhere_is_told_as_text(item: Json, expected: Message) -> None:
    assert to_messages([parse(item)]).messages == (expected,)


def test_what_is_told_is_one_message_with_the_answer_that_follows() -> None:
    answer = {"role": "assistant", "content": "Here."}
    items = [parse(item) for item in (TOLD[0][0], answer)]
    (message,) = to_messages(items).messages
    assert message.content == f"{TOLD[0][1]}Here."


@pytest.mark.parametrize("kind", PLAIN)
def test_an_item_of_a_client_says_the_same_with_members_that_are_given_back(kind: str) -> None:
    item = {"type": kind, **PLAIN[kind]}
    given = {**item, "id": item.get("id", "i_1"), "status": "completed", "namespace": None}
    plain, full = (to_messages([parse(each)]).messages for each in (item, given))
    assert plain == full


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "compaction_trigger"}, "input[0].type"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input"),
        ({"type": "shell_call", "call_id": "c"}, "input[0].action"),
        ({"type": "local_shell_call_output", "output": "1"}, "input[0].call_id"),
    ],
)
async def test_a_bad_item_is_refused_by_its_place(ask, item: Json, param: str) -> None:
    response = await ask([item])
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_conversation_is_found_again_with_what_was_run_elsewhere(api, ask) -> None:
    api.worker.script = ["one", "two"]
    said = [{"role": "user", "content": "hello"}]
    first = await ask(said)
    said += [*first.json()["output"], TOLD[0][0], {"role": "user", "content": "more"}]
    await ask(said)
    again = await ask([*said, {"role": "assistant", "content": "two"}, *said[:1]])
    assert again.headers["kvrecall-match"] == "continued"


async def test_the_form_of_the_text_may_come_with_the_input(turns, ask) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    update = {"type": "configuration_update", "text": {"format": form}}
    await ask([update, {"role": "user", "content": "hello"}])
    assert turns[0].sampling.constraint.schema == '{"type": "integer"}'


async def test_what_has_no_effect_is_left_out_and_named(ask) -> None:
    silent: list[Json] = [{"type": "mcp_list_tools"}, {"type": "dream"}, {"type": 3}]
    silent.append({"type": "item_reference", "id": "rs_1"})
    response = await ask([*silent, {"role": "user", "content": "hello"}])
    named = response.headers["kvrecall-ignored"]
    assert named == "input[0] mcp_list_tools, input[1] dream, input[2] 3, input[3] item_reference"
