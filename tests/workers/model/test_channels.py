"""An answer of several messages (harmony) is told as reasoning, text and calls, however it arrives."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.workers.model.families import FAMILIES
from tests.workers.model.test_answer_formats import TOOLS, WANTED, make, stream
from tests.workers.model.written_calls import OBJECT, TEMPLATES
from workers.model.channel_stream import ChannelStream
from workers.model.text_stream import TextStream
from workers.model.tokenizer import ChatTokenizer

THOUGHT = "<|channel|>analysis<|message|>Where is\nit?<|end|>"
NEXT = "<|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me look.<|end|>"
FINAL = "<|channel|>final<|message|>It rains."
BODY = f" <|constrain|>json<|message|>{OBJECT}"
CALL = f"<|channel|>commentary to=functions.weather{BODY}<|call|>"
IN_ROLE = f" to=functions.weather<|channel|>commentary{BODY}<|call|>"
BARE = f"<|channel|>commentary to=functions.weather<|message|>{OBJECT}<|call|>"


@pytest.fixture(scope="module", params=["tokens", "text"])
def harmony(
    request: pytest.FixtureRequest,
    tokenizer: ChatTokenizer,
    byte_level: Callable[..., PreTrainedTokenizerFast],
) -> ChatTokenizer:
    """A tokenizer whose marks are tokens, as the models' are, and one whose marks are letters."""
    if request.param == "tokens":
        template, tokens = TEMPLATES["harmony"]
        inner = byte_level(template, "<|return|>", tokens)
        return ChatTokenizer(inner, (inner.eos_token_id,))
    inner = deepcopy(tokenizer.inner)
    inner.chat_template = TEMPLATES["harmony"][0]
    return ChatTokenizer(inner, tokenizer.eos_token_ids)


@pytest.mark.parametrize(
    ("answer", "reasoning", "text", "calls"),
    [
        (FINAL, "", "It rains.", 0),
        (f"{THOUGHT}{NEXT}{FINAL}", "Where is\nit?", "It rains.", 0),
        (f"{THOUGHT}{NEXT}{CALL}", "Where is\nit?", "", 1),
        (f"{THOUGHT}{NEXT}{IN_ROLE}", "Where is\nit?", "", 1),
        (f"{THOUGHT}{NEXT}{BARE}", "Where is\nit?", "", 1),
        (IN_ROLE, "", "", 1),
        (f"{PREAMBLE}{NEXT}{THOUGHT}{NEXT}{CALL}", "Where is\nit?", "Let me look.", 1),
        (f"{THOUGHT}{NEXT}{CALL}{NEXT}{IN_ROLE}", "Where is\nit?", "", 2),
        (f"{PREAMBLE}{NEXT}{FINAL}", "", "Let me look.\n\nIt rains.", 0),
        (
            f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}",
            "Where is\nit?\n\nWhere is\nit?",
            "It rains.",
            0,
        ),
        # The prompt may end within a message, and a model may forget a mark.
        ("It rains.", "", "It rains.", 0),
        (" to be or not", "", " to be or not", 0),
        (f"{THOUGHT}It rains.", "Where is\nit?", "It rains.", 0),
        (f"<|channel|>analysis<|message|>Where?{FINAL}", "Where?", "It rains.", 0),
        # What is cut off.
        ("<|channel|>anal", "", "", 0),
        ("<|channel|>analysis<|message|>Where <|", "Where <|", "", 0),
        (f"{THOUGHT}{NEXT}<|channel|>final<|message|>It <", "Where is\nit?", "It <", 0),
    ],
)
def test_messages_are_told_by_their_channels(
    answer: str, reasoning: str, text: str, calls: int, harmony: ChatTokenizer
) -> None:
    sent, reasoned, parsed, streamed = stream(harmony, answer)
    assert (sent, reasoned) == (text, reasoning)
    assert (parsed.text, parsed.reasoning) == (text, reasoning)
    assert parsed.calls == (WANTED,) * calls
    assert streamed.raw == answer.removesuffix("<|return|>")


@pytest.mark.parametrize("body", [" <|constrain|>python<|message|>print(1)", " and nothing else."])
def test_a_malformed_call_is_text(body: str, harmony: ChatTokenizer) -> None:
    sent, _, parsed, _ = stream(
        harmony, f"{THOUGHT}{NEXT}<|channel|>commentary to=functions.f{body}"
    )
    assert sent == parsed.text == f" to=functions.f{body}"
    assert parsed.calls == ()


def test_a_call_that_is_cut_off_keeps_what_was_told_of_it(harmony: ChatTokenizer) -> None:
    _, _, parsed, _ = stream(harmony, f"{THOUGHT}{NEXT}{CALL}"[: -len("2}<|call|>")])
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.complete) == (
        "weather",
        '{"city": "Oslo", "days": ',
        False,
    )


def test_calls_stay_text_where_there_must_be_none(harmony: ChatTokenizer) -> None:
    sent, _, parsed, _ = stream(harmony, f"{THOUGHT}{NEXT}{CALL}", calls=False)
    assert sent == parsed.text == f" to=functions.weather{BODY}"
    assert parsed.calls == ()


def test_stop_strings_are_looked_for_in_the_text_of_one_message(harmony: ChatTokenizer) -> None:
    thought = THOUGHT.replace("it", "the END")
    answer = f"{thought}{NEXT}{PREAMBLE.replace('look.', 'EN')}{NEXT}<|channel|>final<|message|>"
    streamed = TextStream(harmony, ("END", "D is"), tools=TOOLS)
    text = ""
    for token in harmony.encode(f"{answer}D is no stop, END is."):
        text += streamed.push(token).text
        if streamed.stopped:
            break
    assert (streamed.stopped, streamed.stop_sequence, text) == (True, "D is", "Let me EN\n\n")
    assert streamed.raw == answer


def test_a_stop_string_does_not_go_from_a_text_to_a_call(harmony: ChatTokenizer) -> None:
    streamed = TextStream(harmony, ("look. to=",), tools=TOOLS)
    pieces = [streamed.push(token) for token in harmony.encode(f"{PREAMBLE}{NEXT}{CALL}")]
    pieces += streamed.finish()
    assert "".join(piece.text for piece in pieces) == "Let me look."
    assert (streamed.stopped, streamed.parse().calls) == (False, (WANTED,))


def test_the_place_behind_a_calls_mark_is_known(harmony: ChatTokenizer) -> None:
    streamed = TextStream(harmony, ("a stop",), tools=TOOLS)
    answer = f"{PREAMBLE}{NEXT}{THOUGHT}{NEXT}{CALL}"
    for token in harmony.encode(answer):
        streamed.push(token)
    assert streamed.call_at == answer.index("functions.") + len("functions.")


def test_a_plain_text_has_no_messages(harmony: ChatTokenizer) -> None:
    sent, reasoned, _, _ = stream(harmony, FINAL, reasons=False, calls=False)
    assert (sent, reasoned) == (FINAL, "")


def test_other_families_find_the_first_marks_place_too(tokenizer: ChatTokenizer) -> None:
    hermes = make(tokenizer, "hermes")
    answer = f'<think>hm</think>\n\nSo. <tool_call>{{"name": "weather", "arguments": {OBJECT}}}'
    streamed = TextStream(hermes, ("a stop",), tools=TOOLS)
    for token in hermes.encode(answer):
        streamed.push(token)
    assert streamed.call_at == answer.index("<tool_call>") + len("<tool_call>")


def test_an_answers_end_is_kept_as_a_messages_end(
    byte_level: Callable[..., PreTrainedTokenizerFast],
) -> None:
    """The model ends its answer with a mark that no prompt has."""
    known = FAMILIES["gpt-oss"]
    inner = byte_level(known.template, known.end, known.special)
    call, end = (inner.get_vocab()[text] for text in ("<|call|>", "<|end|>"))
    gpt_oss = ChatTokenizer(inner, (inner.eos_token_id, call))
    assert [gpt_oss.keep_end(token) for token in (inner.eos_token_id, call, 7)] == [end, call, 7]
    said = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
    segments = gpt_oss.prompt([], said, [], generate=False)
    assert gpt_oss.decode(segments[-1].token_ids) == "<|channel|>final<|message|>So.<|end|>"
    (following,) = gpt_oss.prompt(said, [{"role": "user", "content": "And?"}], [], generate=True)
    assert (
        gpt_oss.decode(following.token_ids)
        == "<|start|>user<|message|>And?<|end|><|start|>assistant"
    )


def test_calls_of_a_message_are_messages_behind_its_text(
    byte_level: Callable[..., PreTrainedTokenizerFast],
) -> None:
    """The template renders one call of a message, and drops the text before it later on."""
    known = FAMILIES["gpt-oss"]
    inner = byte_level(known.template, known.end, known.special)
    gpt_oss = ChatTokenizer(inner, (inner.eos_token_id, inner.get_vocab()["<|call|>"]))
    function = {"name": "weather", "arguments": OBJECT}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in range(2)]
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "rain"},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "And?"},
    ]
    segments = gpt_oss.prompt([], said, [], generate=True)
    text = gpt_oss.decode([token for each in segments for token in each.token_ids])
    places = [text.index(word) for word in ("Let me look.", "rain", "sun", "It rains.", "And?")]
    assert places == sorted(places)
    assert (
        text.count(f"to=functions.weather<|channel|>commentary json<|message|>{OBJECT}<|call|>")
        == 2
    )


PIECES = [
    THOUGHT,
    NEXT,
    PREAMBLE,
    FINAL,
    CALL,
    IN_ROLE,
    "<|end|>",
    "<|channel|>",
    "so ",
    "<|",
    " to",
]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(PIECES), max_size=7))
def test_no_text_is_lost_or_held(pieces: list[str]) -> None:
    text = "".join(pieces)
    streamed = ChannelStream(" to=functions.")
    found = [streamed.push(char) for char in text]
    assert streamed.window < 12
    found.append(streamed.finish())
    reasoning, said = ("".join(texts) for texts in zip(*found, strict=True))
    assert reasoning == streamed.text
    assert text.count("Where is") == reasoning.count("Where is") + said.count("Where is")
    assert text.count("It rains") == reasoning.count("It rains") + said.count("It rains")
    assert text.count(OBJECT) == reasoning.count(OBJECT) + said.count(OBJECT)
