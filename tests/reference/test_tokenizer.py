"""The shipped tokenizer and its chat template."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from reference.conversation import generate
from reference.data import encode_conversation

SPECIAL = ("<|", "|>", "tool_call>")


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **settings: Any
) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))


@given(text=st.text(max_size=200).filter(lambda text: not any(mark in text for mark in SPECIAL)))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("4821")[-4:] == ["4", "8", "2", "1"]


def test_role_and_call_marks_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    marks = [
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool|>",
        "<|end|>",
        "<tool_call>",
        "</tool_call>",
    ]
    assert tokenizer.tokenize("".join(marks)) == marks
    assert tokenizer.eos_token == "<|end|>"


def test_a_tool_call_stays_visible_without_special_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = '<tool_call>{"name": "on_call", "arguments": {"day": "tonight"}}</tool_call>'
    ids = tokenizer.encode(f"<|assistant|>{text}<|end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_rendering_fewer_messages_gives_a_prefix(
    tokenizer: PreTrainedTokenizerBase, seed: int
) -> None:
    conversation = generate(seed, 600)
    messages = conversation.messages()
    whole = render(tokenizer, messages, tools=conversation.tools)
    for count in range(1, len(messages)):
        assert whole.startswith(render(tokenizer, messages[:count], tools=conversation.tools))


@pytest.mark.parametrize("seed", range(5))
def test_training_uses_the_ids_that_the_template_renders(
    tokenizer: PreTrainedTokenizerBase, seed: int
) -> None:
    conversation = generate(seed, 1500, split="train")
    text = render(tokenizer, conversation.messages(), tools=conversation.tools or None)
    row = encode_conversation(conversation, tokenizer, limit=10**9)
    assert row.ids == tokenizer.encode(text, add_special_tokens=False)
    answers = [
        f" {exchange.answer}." for exchange in conversation.exchanges if exchange.answer is not None
    ]
    assert [tokenizer.decode(row.ids[start:end]) for start, end, _, _ in row.answers] == answers


def test_arguments_may_be_text_or_a_dict(tokenizer: PreTrainedTokenizerBase) -> None:
    def message(arguments: Any) -> list[dict[str, Any]]:
        return [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            }
        ]

    assert render(tokenizer, message({"a": 1})) == render(tokenizer, message('{"a": 1}'))


def test_the_generation_prompt_opens_the_assistants_message(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    whole = render(tokenizer, messages, add_generation_prompt=True)
    assert whole == "<|user|>Hello.<|end|><|assistant|>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": None},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"arguments": ""}}],
        },
        {"role": "tool", "content": None},
        {"role": "tool", "content": {"rows": [1, 2]}, "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]},
        {"role": "developer", "content": "Be short."},
        {"role": "function", "name": "f", "content": "{}"},
        {"role": "user"},
    ],
)
def test_messages_of_real_clients_render(
    tokenizer: PreTrainedTokenizerBase, message: dict[str, Any]
) -> None:
    tools = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
        {"name": "h", "parameters": {"properties": {"x": {}, "y": {}}}},
    ]
    for offered in (None, [], tools):
        assert render(tokenizer, [message], tools=offered).endswith("<|end|>")
    assert render(tokenizer, [message], tools=tools).count("f(), g(), h(x, y).") == 1
