"""Messages to tokens without ever encoding a turn twice, and tokens to text that may be shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from workers.errors import BadMessages, ModelRefused
from workers.model.tokenizer import (
    ChatTokenizer,
    TextStream,
    keep_recent,
    load_tokenizer,
    parse_tool_calls,
)

DEFAULT_SYSTEM = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] -%}
{%- else %}{% set system = 'You are a helpful assistant.' %}{% set rest = messages %}{% endif -%}
<|im_start|>system
{{ system }}
{%- if tools %}

# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- endif %}<|im_end|>
{% for message in rest -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""ChatML with a system prompt of its own when none is given, and the tools in it."""

FORGETS_THINKING = """
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{%- endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and '</think>' in message.content and loop.index0 < last.user -%}
{{ message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else -%}
{{ message.content }}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""ChatML that strips the thinking of an assistant's turn as soon as a user has spoken after it."""

TOOLS = [
    {"type": "function", "function": {"name": "lookup", "parameters": {"properties": {"city": {}}}}}
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"city": "Oslo"}'},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "My gate is 42.\nRemember it."},
    {"role": "assistant", "content": "I will."},
    {"role": "user", "content": "Where is it warm?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "Oslo: 25 degrees", "tool_call_id": "c1"},
    {"role": "assistant", "content": "In Oslo."},
    {"role": "user", "content": "And my gate?"},
]


@pytest.fixture(scope="module")
def chatml() -> Callable[[str], ChatTokenizer]:
    """chatml(template): a byte-level tokenizer with ChatML's marks and that template."""

    def make(template: str) -> ChatTokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        inner = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
        )
        inner.chat_template = template
        return ChatTokenizer(inner, (inner.eos_token_id,))

    return make


def _by_turns(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: list[Any]
) -> list[int]:
    """The tokens of a conversation as a worker says them: turn by turn, with what a rendering needs kept."""
    said: list[int] = []
    recent: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            new.append(message)
            continue
        for segment in tokenizer.prompt(recent, new, tools, generate=True):
            assert not segment.recorded
            said += segment.token_ids
        # The answer's own tokens: its text as the template would write it, up to its end of turn.
        start = tokenizer.inner.apply_chat_template(
            [*recent, *new], tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        calls = [
            {
                **c,
                "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])},
            }
            for c in message.get("tool_calls", [])
        ]
        spoken = {**message, "tool_calls": calls} if calls else message
        full = tokenizer.inner.apply_chat_template(
            [*recent, *new, spoken], tools=tools or None, tokenize=False
        )
        said += tokenizer.encode(full[len(start) :].rstrip())
        recent = keep_recent([*recent, *new, message])
        new = []
    for segment in tokenizer.prompt(recent, new, tools, generate=True):
        said += segment.token_ids
    return said


def _whole(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: list[Any]) -> str:
    for_template = json.loads(json.dumps(messages))
    for message in for_template:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = tokenizer.inner.apply_chat_template(
        for_template, tools=tools or None, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    "system", [[], [{"role": "system", "content": "Be brief."}]], ids=["default", "system"]
)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
def test_turn_by_turn_the_reference_models_conversation_is_encoded_as_a_whole(
    system: list[Any], tools: list[Any], tokenizer: ChatTokenizer
) -> None:
    messages = [*system, *CONVERSATION]
    assert _by_turns(tokenizer, messages, tools) == tokenizer.encode(
        _whole(tokenizer, messages, tools)
    )


@pytest.mark.parametrize(
    "system", [[], [{"role": "system", "content": "Be brief."}]], ids=["default", "system"]
)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
def test_turn_by_turn_a_chatml_conversation_is_encoded_as_a_whole(
    system: list[Any], tools: list[Any], chatml: Callable[[str], ChatTokenizer]
) -> None:
    tokenizer = chatml(DEFAULT_SYSTEM)
    messages = [*system, *CONVERSATION]
    assert _by_turns(tokenizer, messages, tools) == tokenizer.encode(
        _whole(tokenizer, messages, tools)
    )


def test_a_template_that_forgets_thinking_still_gets_only_what_is_new(
    chatml: Callable[[str], ChatTokenizer],
) -> None:
    """The thinking that was said stays in the cache, as it was said; only the next message is added."""
    tokenizer = chatml(FORGETS_THINKING)
    heard = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOne."},
    ]
    following = {"role": "user", "content": "Two?"}
    (segment,) = tokenizer.prompt(keep_recent(heard), [following], [], generate=True)
    text = tokenizer.inner.decode(list(segment.token_ids))
    assert text == "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    recorded = tokenizer.prompt([], [*heard, following], [], generate=True)
    texts = [tokenizer.inner.decode(list(s.token_ids)) for s in recorded]
    assert texts == [
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
        "<think>\nhm\n</think>\n\nOne.<|im_end|>",
        text,
    ]
    assert [s.recorded for s in recorded] == [False, True, False]


def test_recorded_answers_are_marked_and_end_as_generated_ones_do(tokenizer: ChatTokenizer) -> None:
    segments = tokenizer.prompt([], CONVERSATION, TOOLS, generate=False)
    assert [segment.recorded for segment in segments] == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    for segment in segments:
        if segment.recorded:
            assert segment.token_ids[-1] == tokenizer.eos_token_ids[0]
    said = [token for segment in segments for token in segment.token_ids]
    whole = _whole(tokenizer, CONVERSATION, TOOLS).removesuffix("<|assistant|>")
    assert said == tokenizer.encode(whole)


def test_an_answer_may_follow_an_answer(tokenizer: ChatTokenizer) -> None:
    segments = tokenizer.prompt(CONVERSATION[:1], CONVERSATION[1:2], [], generate=True)
    assert tokenizer.inner.decode(list(segments[-1].token_ids)) == "<|assistant|>"
    assert tokenizer.prompt(CONVERSATION[:1], [], [], generate=True) == []


def test_what_the_template_refuses_is_a_bad_message(chatml: Callable[[str], ChatTokenizer]) -> None:
    tokenizer = chatml("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadMessages, match="roles must alternate"):
        tokenizer.prompt([], CONVERSATION[:1], [], generate=True)


def test_the_next_rendering_needs_the_system_message_and_all_since_the_last_user() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert keep_recent(CONVERSATION[:6]) == CONVERSATION[2:6]
    assert keep_recent([system, *CONVERSATION]) == [system, CONVERSATION[6]]
    assert keep_recent([system]) == [system]
    assert keep_recent([]) == []


# Loading


def test_a_tokenizer_without_a_chat_template_is_refused(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    inner = AutoTokenizer.from_pretrained(model_path("reference"))
    inner.chat_template = None
    inner.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="chat template"):
        load_tokenizer(tmp_path, [1])
    with pytest.raises(ModelRefused, match="no tokenizer"):
        load_tokenizer(tmp_path / "nothing", [1])


def test_the_tokenizers_own_end_of_turn_comes_first(model_path: Callable[[str], Path]) -> None:
    assert load_tokenizer(model_path("reference"), [0, 1]).eos_token_ids == (1, 0)
    assert load_tokenizer(model_path("reference"), [0]).eos_token_ids == (0,)
    assert load_tokenizer(model_path("reference"), []).eos_token_ids == (1,)


# Tool calls


def test_calls_are_taken_out_of_the_text() -> None:
    text = 'Let me see. <tool_call>\n{"name": "a", "arguments": {"x": {"y": [1, "}"]}}}\n</tool_call> and'
    text += '<tool_call>{"name": "b"}</tool_call>'
    left, calls = parse_tool_calls(text)
    assert left == "Let me see.  and"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("a", {"x": {"y": [1, "}"]}}),
        ("b", {}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        '<tool_call>{"name": "a", "arguments": {}',
        '<tool_call>{"name": "a", "arguments": {}}',
        "<tool_call>{name: a}</tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "a"} and more</tool_call>',
        "</tool_call>",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_what_is_not_well_formed_stays_in_the_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, [])


def test_a_bad_call_does_not_hide_a_good_one() -> None:
    left, calls = parse_tool_calls(
        '<tool_call>{"bad <tool_call>{"name": "a", "arguments": {"t": "</tool_call>"}}</tool_call>'
    )
    assert left == '<tool_call>{"bad'
    assert [(call.name, call.arguments) for call in calls] == [("a", '{"t": "</tool_call>"}')]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=9), st.dictionaries(st.text(max_size=5), JSON, max_size=3)
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_any_calls_survive_being_written_and_parsed(
    calls: list[tuple[str, dict[str, Any]]], ascii: bool
) -> None:
    written = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii)
        for name, arguments in calls
    ]
    left, parsed = parse_tool_calls(
        "so" + "".join(f"<tool_call>{text}</tool_call>" for text in written)
    )
    assert left == "so"
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls


# Streaming


def _stream(
    tokenizer: ChatTokenizer, text: str, stop: tuple[str, ...] = ()
) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)
    shown = []
    for token in tokenizer.encode(text):
        shown.append(stream.push(token))
        if stream.stopped:
            break
    return [*shown, stream.finish()], stream


@pytest.mark.parametrize(
    "text", ["plain words", "käse 🧀 und 日本語 🏳️‍🌈!", "  spaces\n\n kept \t", "日本"]
)
def test_characters_are_shown_whole_and_all_of_them(text: str, tokenizer: ChatTokenizer) -> None:
    shown, stream = _stream(tokenizer, text)
    assert "".join(shown) == stream.text == text
    assert not any("�" in piece for piece in shown)


def test_a_character_is_split_over_tokens_here(tokenizer: ChatTokenizer) -> None:
    shown, _ = _stream(tokenizer, "🧀")
    assert len(shown) > 2
    assert [piece for piece in shown if piece] == ["🧀"]


@settings(deadline=None, max_examples=60)
@given(
    text=st.text(st.sampled_from("ab<tol_ce>/ \n🧀"), max_size=40),
    stop=st.sampled_from(["ab", "o l", "🧀a", "\n\n"]),
)
def test_a_stop_string_is_found_over_token_borders_and_never_shown(
    text: str, stop: str, tokenizer: ChatTokenizer
) -> None:
    shown, stream = _stream(tokenizer, text, (stop,))
    assert stream.stopped == (stop in text)
    assert "".join(shown) == text.split(stop)[0]


def test_the_first_of_several_stop_strings_counts(tokenizer: ChatTokenizer) -> None:
    shown, stream = _stream(tokenizer, "one two three", ("three", "two"))
    assert "".join(shown) == stream.text == "one "


def test_nothing_of_a_tool_call_is_shown(tokenizer: ChatTokenizer) -> None:
    call = '<tool_call>{"name": "lookup", "arguments": {"city": "Oslo"}}</tool_call>'
    shown, stream = _stream(tokenizer, f"Let me look. {call}")
    assert "".join(shown) == "Let me look. "
    assert stream.text.endswith("</tool_call>")


def test_what_only_looked_like_a_tool_call_is_shown_at_the_end(tokenizer: ChatTokenizer) -> None:
    for text in ("a <tool", "see <tool_call>{broken</tool_call> there", "stop <tool_call>{"):
        shown, _ = _stream(tokenizer, text)
        assert "".join(shown) == text
        assert "<" not in "".join(shown[:-1])


def test_special_tokens_are_not_text(tokenizer: ChatTokenizer) -> None:
    shown, _ = _stream(tokenizer, "yes<|user|>")
    assert "".join(shown) == "yes"
