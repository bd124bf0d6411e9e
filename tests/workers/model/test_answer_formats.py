"""Every family's calls and reasoning are found, streamed alike, and text where they are malformed."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.model.written_calls import CALLS, MALFORMED, OBJECT, TEMPLATES
from workers.model.answer_formats import find_format
from workers.model.call_stream import CallStream
from workers.model.calls.sink import ParsedCall
from workers.model.text_stream import ParsedAnswer, TextStream
from workers.model.tokenizer import ChatTokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
WANTED = ParsedCall("weather", '{"city": "Oslo", "days": 2}')


THINK = ("<think>", "</think>")


def make(tokenizer: ChatTokenizer, family: str, template: Any = None) -> ChatTokenizer:
    """The reference model's tokenizer with a family's chat template and special tokens."""
    text, tokens = TEMPLATES[family]
    inner = deepcopy(tokenizer.inner)
    inner.chat_template = text
    inner.add_special_tokens({"additional_special_tokens": list(tokens)})
    if template is not None:
        inner.response_template = template
    return ChatTokenizer(inner, tokenizer.eos_token_ids)


def stream(
    tokenizer: ChatTokenizer, text: str, **options: Any
) -> tuple[str, str, ParsedAnswer, TextStream]:
    """Stream a text token by token; returns the text and the reasoning that were sent."""
    streamed = TextStream(tokenizer, tools=TOOLS, **options)
    pieces = [streamed.push(token) for token in tokenizer.encode(text)]
    pieces += streamed.finish()
    sent = "".join(piece.text for piece in pieces)
    return sent, "".join(piece.reasoning for piece in pieces), streamed.parse(), streamed


def unnumbered(parsed: ParsedAnswer) -> tuple[ParsedCall, ...]:
    return tuple(replace(call, number="") for call in parsed.calls)


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_a_family_is_known_by_its_chat_template(family: str, tokenizer: ChatTokenizer) -> None:
    assert make(tokenizer, family).format.name == family


def test_the_reference_model_writes_calls_as_hermes_does(tokenizer: ChatTokenizer) -> None:
    assert find_format(tokenizer.inner).name == "hermes"
    assert tokenizer.format.reasoning is None


@pytest.mark.parametrize("family", list(CALLS))
@pytest.mark.parametrize("before", ["", "Let me look. "])
def test_a_call_is_parsed_and_not_sent(family: str, before: str, tokenizer: ChatTokenizer) -> None:
    sent, _, parsed, _ = stream(make(tokenizer, family), before + CALLS[family])
    assert (parsed.text, unnumbered(parsed)) == (before.strip(), (WANTED,))
    assert sent == before


@pytest.mark.parametrize("family", sorted(set(CALLS) - {"llama", "llama4", "mistral", "harmony"}))
def test_several_calls_are_parsed(family: str, tokenizer: ChatTokenizer) -> None:
    sent, _, parsed, _ = stream(make(tokenizer, family), f"So.\n{CALLS[family]}\n{CALLS[family]}")
    assert unnumbered(parsed) == (WANTED, WANTED)
    assert sent.strip() == parsed.text == "So."


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "glm",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
            "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        ),
        ("kimi", CALLS["kimi"].replace(":0<", ":0 <")),
        ("kimi", CALLS["kimi"].replace("functions.", "")),
        ("kimi", CALLS["kimi"].replace(":0", "")),
        ("deepseek", CALLS["deepseek"].removesuffix("<｜tool▁calls▁end｜>")),
        ("deepseek-fenced", CALLS["deepseek-fenced"].replace("\n```<", "\n```\n<")),
        ("granite", CALLS["granite"].replace("[{", " [\n {").replace("}]", "}\n]")),
        ("lfm2", CALLS["lfm2"].replace('"', "'")),
        ("lfm2", CALLS["lfm2"].replace("[", "").replace("]", "")),
        ("olmo", CALLS["olmo"].replace(">w", ">\nw").replace(")<", ")\n<")),
        ("llama4", f"{CALLS['llama4']}<|python_end|>"),
        ("gemma", CALLS["gemma"].replace(":2", ": 2 ").replace(",", ", ")),
        ("minimax", CALLS["minimax"].replace("\n", "")),
    ],
)
def test_what_models_write_beside_their_templates_is_read(
    family: str, text: str, tokenizer: ChatTokenizer
) -> None:
    sent, _, parsed, _ = stream(make(tokenizer, family), text)
    assert (sent.strip(), unnumbered(parsed)) == ("", (WANTED,))


REASONS = sorted(
    family for family, (text, _) in TEMPLATES.items() if "</think>" in text and family in CALLS
)


@pytest.mark.parametrize("family", [*REASONS, "gemma"])
def test_a_family_reasons_before_its_calls(family: str, tokenizer: ChatTokenizer) -> None:
    opening, closing = ("<|channel>thought", "<channel|>") if family == "gemma" else THINK
    text = f"{opening}\nIt may rain.\n{closing}\n\nLet me look. {CALLS[family]}"
    sent, reasoning, parsed, _ = stream(make(tokenizer, family), text)
    assert (sent, reasoning) == ("Let me look. ", "It may rain.")
    assert (parsed.text, unnumbered(parsed)) == ("Let me look.", (WANTED,))


@pytest.mark.parametrize(
    ("family", "text"), [(family, text) for family in MALFORMED for text in MALFORMED[family]]
)
def test_what_is_malformed_stays_text_and_is_sent(
    family: str, text: str, tokenizer: ChatTokenizer
) -> None:
    sent, _, parsed, _ = stream(make(tokenizer, family), f"See {text}")
    assert sent == parsed.text == f"See {text}"
    assert parsed.calls == ()


def test_a_bad_call_does_not_hide_a_good_one(tokenizer: ChatTokenizer) -> None:
    bad = '<tool_call>{"bad '
    sent, _, parsed, _ = stream(make(tokenizer, "hermes"), bad + CALLS["hermes"])
    assert parsed.calls == (WANTED,)
    assert sent.strip() == parsed.text == bad.strip()


def test_llamas_calls_of_known_tools_need_no_mark_at_an_answers_beginning(
    tokenizer: ChatTokenizer,
) -> None:
    llama = make(tokenizer, "llama")
    call = f'{{"name": "weather", "parameters": {OBJECT}}}'
    sent, _, parsed, _ = stream(llama, call)
    assert (sent, parsed.calls) == ("", (WANTED,))
    for text in ('{"name": "Ann", "age": 3}', f"Like this: {call}", '{"name": "Ann"}'):
        sent, _, parsed, _ = stream(llama, text)
        assert (sent, parsed.calls) == (text, ())
    sent, _, parsed, _ = stream(llama, f"{call} and more")
    assert (sent, parsed.text, parsed.calls) == ("and more", "and more", (WANTED,))


def test_llama_4_writes_calls_as_a_program_or_as_json_with_or_without_a_mark(
    tokenizer: ChatTokenizer,
) -> None:
    llama = make(tokenizer, "llama4")
    program = "[weather(city='Oslo', days=2), weather(city='Oslo', days=2)]"
    written = f'{{"name": "weather", "parameters": {OBJECT}}}'
    for text, count in ((program, 2), (f"{written};{written}", 2), (written, 1)):
        for mark in ("", "<|python_start|>"):
            sent, _, parsed, _ = stream(llama, mark + text)
            assert (sent, parsed.calls) == ("", (WANTED,) * count)
    for text in ("[other(city='Oslo')]", "[1, 2]", "[weather](a link)", '["a", "b"]', "[weather]"):
        sent, _, parsed, _ = stream(llama, text)
        assert (sent, parsed.calls) == (text, ())


@pytest.mark.parametrize("family", ["qwen-xml", "glm", "minimax"])
def test_values_in_tags_have_the_types_of_the_tools_schema(
    family: str, tokenizer: ChatTokenizer
) -> None:
    text = CALLS[family].replace("2", "many").replace("Oslo", "12")
    _, _, parsed, _ = stream(make(tokenizer, family), text)
    assert [json.loads(call.arguments) for call in parsed.calls] == [{"city": "12", "days": "many"}]


def test_calls_stay_text_where_there_must_be_none(tokenizer: ChatTokenizer) -> None:
    sent, _, parsed, _ = stream(make(tokenizer, "hermes"), CALLS["hermes"], calls=False)
    assert sent == parsed.text == CALLS["hermes"]
    assert parsed.calls == ()


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        (None, "<think>\nTwo and\ntwo.\n</think>\n\nFour."),
        (None, "\n<think>Two and\ntwo.</think>Four."),
        (True, "\nTwo and\ntwo.\n</think>\n\nFour."),
    ],
)
def test_reasoning_is_apart_from_the_text(
    reasons: bool | None, text: str, tokenizer: ChatTokenizer
) -> None:
    sent, reasoning, parsed, _ = stream(make(tokenizer, "hermes"), text, reasons=reasons)
    assert (sent, parsed.text) == ("Four.", "Four.")
    assert reasoning == parsed.reasoning == "Two and\ntwo."


def test_calls_may_follow_the_reasoning_but_are_not_looked_for_in_it(
    tokenizer: ChatTokenizer,
) -> None:
    text = f"<think>I could write {CALLS['hermes']}</think>\n\n{CALLS['hermes']}"
    sent, reasoning, parsed, _ = stream(make(tokenizer, "hermes"), text)
    assert (sent, parsed.text, parsed.calls) == ("", "", (WANTED,))
    assert reasoning == parsed.reasoning == f"I could write {CALLS['hermes']}"


def test_a_reasoning_that_is_cut_off_is_no_text(tokenizer: ChatTokenizer) -> None:
    sent, reasoning, parsed, _ = stream(make(tokenizer, "hermes"), "<think>Two and </thi")
    assert (sent, parsed.text) == ("", "")
    assert reasoning == parsed.reasoning == "Two and </thi"


@pytest.mark.parametrize("text", ["<thin", "I <think> so</think>.", "<b>"])
def test_an_answer_that_does_not_begin_with_reasoning_is_text(
    text: str, tokenizer: ChatTokenizer
) -> None:
    sent, reasoning, parsed, _ = stream(make(tokenizer, "hermes"), text)
    assert sent == parsed.text == text
    assert reasoning == ""


def test_stop_strings_are_looked_for_behind_the_reasoning(tokenizer: ChatTokenizer) -> None:
    qwen = make(tokenizer, "hermes")
    streamed = TextStream(qwen, ("END",))
    text = ""
    for token in qwen.encode("<think>the END</think>\n\nup to END here"):
        text += streamed.push(token).text
        if streamed.stopped:
            break
    assert (streamed.stopped, text) == (True, "up to ")


OWN = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {},
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<|call|>",
            "close": "<|done|>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.tool}", "arguments": "{content.args}"},
            },
        },
    },
}


def test_a_tokenizers_own_response_template_comes_first(tokenizer: ChatTokenizer) -> None:
    own = make(tokenizer, "plain", OWN)
    assert own.format.name == "response_template"
    call = f'<|call|>{{"tool": "weather", "args": {OBJECT}}}<|done|>'
    sent, reasoning, parsed, _ = stream(own, f"<think>hm</think>So. {call}{call}")
    assert (sent, reasoning, parsed.text) == ("So. ", "hm", "So.")
    assert parsed.calls == (WANTED, WANTED)
    for bad in ("<|call|>{<|done|>", "<|call|>{}<|done|>", '<|call|>{"tool": "weather"'):
        sent, _, parsed, _ = stream(own, f"So. {bad}")
        assert sent == parsed.text == f"So. {bad}"


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
    tokenizer: ChatTokenizer, calls: list[tuple[str, dict[str, Any]]], ascii: bool
) -> None:
    written = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii)
        for name, arguments in calls
    ]
    text = "so" + "".join(f"<tool_call>{each}</tool_call>" for each in written)
    left, parsed = read(tokenizer, text)
    assert left == "so"
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls


def read(tokenizer: ChatTokenizer, text: str) -> tuple[str, list[ParsedCall]]:
    """The plain text and the calls of a text that arrives whole."""
    calls = CallStream(tokenizer.format, (), enabled=True)
    plain, _ = calls.push(text)
    _, behind = calls.finish()
    return plain + behind, list(calls.calls)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "a", "arguments": ',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "a" and more}</tool_call>',
        "</tool_call>",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_what_is_no_call_of_hermes_form_stays_text(text: str, tokenizer: ChatTokenizer) -> None:
    assert read(tokenizer, text) == (text, [])


def test_ids_of_calls_have_nine_letters_where_the_template_wants_them(
    tokenizer: ChatTokenizer,
) -> None:
    mistral = make(tokenizer, "mistral")
    mistral.inner.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.id }}{% endfor %}"
        "{{ m.tool_call_id }} {% endfor %}"
    )
    call = {"id": "call_17_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    long = {**call, "id": "call_1234_0"}
    asked = {"role": "assistant", "content": "", "tool_calls": [long]}
    answered = {"role": "tool", "content": "1", "tool_call_id": "call_1234_0"}
    (segment,) = mistral.prompt([asked], [answered], [], False)
    asked_id, answered_id = mistral.decode(mistral.encode("")), mistral.decode(segment.token_ids)
    assert asked_id == ""
    assert len(answered_id.strip()) == 9
    assert answered_id.strip().isalnum()
