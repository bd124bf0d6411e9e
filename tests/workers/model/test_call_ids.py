"""Calls and their results have the ids that a chat template takes, in history and in new turns."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.workers.model.families import FAMILIES
from workers.model.calls.ids import CallIds, name_call, write_ids
from workers.model.tokenizer import ChatTokenizer


def call(id: str, name: str = "weather") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}


def ids(form: CallIds, *messages: dict[str, Any]) -> list[str]:
    written = write_ids(messages, form)
    calls = [each["id"] for message in written for each in message.get("tool_calls", ())]
    return calls + [each["tool_call_id"] for each in written if "tool_call_id" in each]


def test_an_id_keeps_the_number_that_the_model_gave() -> None:
    assert name_call(17, 0) == "call_17_0"
    assert name_call(17, 0, "3") == "call_17_0_3"
    asked = {"role": "assistant", "tool_calls": [call("call_17_0_3"), call("call_17_1_4", "tides")]}
    told = {"role": "tool", "tool_call_id": "call_17_1_4", "content": "low"}
    assert ids(CallIds.NUMBERED, asked, told) == [
        *("functions.weather:3", "functions.tides:4"),
        "functions.tides:4",
    ]


def test_other_ids_are_numbered_within_their_message() -> None:
    asked = {"role": "assistant", "tool_calls": [call("toolu_x"), call("call_17_1", "tides")]}
    told = {"role": "tool", "tool_call_id": "call_17_1", "content": "low"}
    alone = {"role": "tool", "tool_call_id": "lost", "name": "tides", "content": "low"}
    own = {"role": "tool", "tool_call_id": "functions.tides:9", "content": "low"}
    assert ids(CallIds.NUMBERED, asked, told, alone, own) == [
        *("functions.weather:0", "functions.tides:1"),
        *("functions.tides:1", "functions.tides:0", "functions.tides:9"),
    ]


def test_ids_are_left_as_they_are_or_short() -> None:
    asked = {"role": "assistant", "tool_calls": [call("call_17_0"), call("abcdefgh1")]}
    told = {"role": "tool", "tool_call_id": "call_17_0", "content": "low"}
    assert ids(CallIds.ANY, asked, told) == ["call_17_0", "abcdefgh1", "call_17_0"]
    first, second, result = ids(CallIds.SHORT, asked, told)
    assert (second, result) == ("abcdefgh1", first)
    assert (len(first), first.isalnum()) == (9, True)


@pytest.mark.parametrize(("family", "wanted"), [("deepseek", True), ("kimi", False)])
def test_arguments_are_texts_where_a_template_adds_them_to_one(
    family: str, wanted: bool, byte_level: Callable[..., PreTrainedTokenizerFast]
) -> None:
    known = FAMILIES[family]
    inner = byte_level(known.template, known.end, known.special, known.added)
    tokenizer = ChatTokenizer(inner, (inner.eos_token_id,))
    assert tokenizer.text_arguments == wanted
    asked = {"role": "assistant", "content": "", "tool_calls": [call("call_1_0")]}
    function = {"name": "weather", "arguments": '{"a": "é'}
    cut = {**asked, "tool_calls": [{**call("call_1_0"), "function": function}]}
    for message, text in ((asked, '{"a": 1}'), (cut, '{"a": "é"}')):
        segments = tokenizer.prompt([], [message], [], generate=False)
        assert text in tokenizer.decode([t for each in segments for t in each.token_ids])
