"""Messages to tokens without ever encoding a turn twice, and tokens to text that may be shown."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from workers.errors import BadMessages, ModelRefused
from workers.model.tokenizer import ChatTokenizer, keep_recent, load_tokenizer

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

DROPS_THINKING = """
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
"""ChatML that strips the thinking of an assistant's turn once a user's message follows."""

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
def chatml(byte_level: Callable[..., PreTrainedTokenizerFast]) -> Callable[[str], ChatTokenizer]:
    """chatml(template): a byte-level tokenizer with ChatML's marks and that template."""

    def make(template: str) -> ChatTokenizer:
        inner = byte_level(template, "<|im_end|>", ["<|im_start|>"])
        return ChatTokenizer(inner, (inner.eos_token_id,))

    return make


def _by_turns(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: list[Any]
) -> list[int]:
    """The tokens of a conversation as a worker appends them, turn by turn."""
    token_ids: list[int] = []
    recent: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            new.append(message)
            continue
        for segment in tokenizer.prompt(recent, new, tools, generate=True):
            assert not segment.recorded
            token_ids += segment.token_ids
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
        answer = {**message, "tool_calls": calls} if calls else message
        full = tokenizer.inner.apply_chat_template(
            [*recent, *new, answer], tools=tools or None, tokenize=False
        )
        assert isinstance(start, str)
        assert isinstance(full, str)
        token_ids += tokenizer.encode(full[len(start) :].rstrip())
        recent = keep_recent([*recent, *new, message])
        new = []
    for segment in tokenizer.prompt(recent, new, tools, generate=True):
        token_ids += segment.token_ids
    return token_ids


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


def test_a_template_that_drops_thinking_still_encodes_only_new_messages(
    chatml: Callable[[str], ChatTokenizer],
) -> None:
    """Generated thinking stays in the cache unchanged; only the next message is appended."""
    tokenizer = chatml(DROPS_THINKING)
    earlier = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOne."},
    ]
    following = {"role": "user", "content": "Two?"}
    (segment,) = tokenizer.prompt(keep_recent(earlier), [following], [], generate=True)
    text = tokenizer.inner.decode(list(segment.token_ids))
    assert text == "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    recorded = tokenizer.prompt([], [*earlier, following], [], generate=True)
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
    token_ids = [token for segment in segments for token in segment.token_ids]
    whole = _whole(tokenizer, CONVERSATION, TOOLS).removesuffix("<|assistant|>")
    assert token_ids == tokenizer.encode(whole)


def test_an_answer_may_follow_an_answer(tokenizer: ChatTokenizer) -> None:
    segments = tokenizer.prompt(CONVERSATION[:1], CONVERSATION[1:2], [], generate=True)
    assert tokenizer.inner.decode(list(segments[-1].token_ids)) == "<|assistant|>"
    assert tokenizer.prompt(CONVERSATION[:1], [], [], generate=True) == []


def test_messages_that_the_template_refuses_are_bad_messages(
    chatml: Callable[[str], ChatTokenizer],
) -> None:
    tokenizer = chatml("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadMessages, match="roles must alternate"):
        tokenizer.prompt([], CONVERSATION[:1], [], generate=True)


def test_an_escape_that_is_half_a_character_makes_bad_messages(
    chatml: Callable[[str], ChatTokenizer],
) -> None:
    """JSON of a tool or of the template's arguments may have it: a text that UTF-8 has not."""
    tokenizer = chatml("{{ style }}{{ messages[-1]['content'] }}<|im_end|>")
    arguments = json.loads(r'{"style": "\ud800"}')
    with pytest.raises(BadMessages, match="lone surrogate"):
        tokenizer.prompt([], CONVERSATION[:1], [], generate=True, arguments=arguments)


def test_the_next_rendering_needs_the_system_message_and_all_since_the_last_user() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert keep_recent(CONVERSATION[:5]) == CONVERSATION[2:5]
    assert keep_recent(CONVERSATION[:6]) == [CONVERSATION[2], CONVERSATION[5]]
    assert keep_recent([system, *CONVERSATION]) == [system, CONVERSATION[6]]
    assert keep_recent([system]) == [system]
    assert keep_recent([]) == []


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


def test_further_arguments_reach_the_template(tokenizer: ChatTokenizer) -> None:
    inner = copy.deepcopy(tokenizer.inner)
    inner.chat_template = "{{ mood | default('plain') }} {{ messages[0]['content'] }}"
    other = ChatTokenizer(inner, tokenizer.eos_token_ids)
    asked = [{"role": "user", "content": "hello"}]
    (plain,) = other.prompt([], asked, [], generate=True)
    (glad,) = other.prompt([], asked, [], generate=True, arguments={"mood": "glad"})
    assert other.decode(plain.token_ids) == "plain hello"
    assert other.decode(glad.token_ids) == "glad hello"


def test_half_an_emoji_in_a_calls_arguments_is_a_character(tokenizer: ChatTokenizer) -> None:
    function = {"name": "look", "arguments": '{"q": "\\ud83d"}'}
    call = {"id": "c1", "type": "function", "function": function}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
    ]
    segments = tokenizer.prompt([], said, [], generate=True)
    assert "\ufffd" in "".join(tokenizer.decode(segment.token_ids) for segment in segments)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_messages_for_which_a_template_does_not_end_are_refused(tokenizer: ChatTokenizer) -> None:
    inner = copy.deepcopy(tokenizer.inner)
    inner.chat_template = f"{{% if messages[0].content == 'endless' %}}{ENDLESS}{{% endif %}}"
    limited = ChatTokenizer(inner, tokenizer.eos_token_ids, template_seconds=0.05)
    with pytest.raises(BadMessages, match=r"over 0\.05 s"):
        limited.prompt([], [{"role": "user", "content": "endless"}], [], True)


def test_a_template_that_never_ends_is_refused_with_its_model(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = copy.deepcopy(tokenizer.inner)
    inner.chat_template = ENDLESS
    inner.save_pretrained(tmp_path)
    monkeypatch.setattr("workers.model.tokenizer._LOAD_SECONDS", 0.05)
    with pytest.raises(ModelRefused, match="does not end"):
        load_tokenizer(tmp_path, tokenizer.eos_token_ids)
