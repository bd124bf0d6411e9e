"""A text stream sends whole characters, without tool calls, up to a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.model.text_stream import TextStream
from workers.model.tokenizer import ChatTokenizer


def _stream(
    tokenizer: ChatTokenizer, text: str, stop: tuple[str, ...] = ()
) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)
    sent = []
    for token in tokenizer.encode(text):
        sent.append(stream.push(token).text)
        if stream.stopped:
            break
    return [*sent, stream.finish().text], stream


@pytest.mark.parametrize(
    "text", ["plain words", "käse 🧀 und 日本語 🏳️‍🌈!", "  spaces\n\n kept \t", "日本"]
)
def test_characters_are_sent_whole_and_completely(text: str, tokenizer: ChatTokenizer) -> None:
    sent, stream = _stream(tokenizer, text)
    assert "".join(sent) == stream.raw == text
    assert not any("�" in piece for piece in sent)


def test_a_character_of_several_tokens_is_sent_once(tokenizer: ChatTokenizer) -> None:
    sent, _ = _stream(tokenizer, "🧀")
    assert len(sent) > 2
    assert [piece for piece in sent if piece] == ["🧀"]


@settings(deadline=None, max_examples=60)
@given(
    text=st.text(st.sampled_from("ab<tol_ce>/ \n🧀"), max_size=40),
    stop=st.sampled_from(["ab", "o l", "🧀a", "\n\n"]),
)
def test_a_stop_string_is_found_over_token_borders_and_never_sent(
    text: str, stop: str, tokenizer: ChatTokenizer
) -> None:
    sent, stream = _stream(tokenizer, text, (stop,))
    assert stream.stopped == (stop in text)
    assert stream.stop_sequence == (stop if stop in text else "")
    assert "".join(sent) == text.split(stop)[0]


def test_the_first_of_several_stop_strings_counts(tokenizer: ChatTokenizer) -> None:
    sent, stream = _stream(tokenizer, "one two three", ("three", "two"))
    assert "".join(sent) == stream.raw == "one "
    assert stream.stop_sequence == "two"


def test_a_tool_call_is_not_sent(tokenizer: ChatTokenizer) -> None:
    call = '<tool_call>{"name": "lookup", "arguments": {"city": "Oslo"}}</tool_call>'
    sent, stream = _stream(tokenizer, f"Let me look. {call}")
    assert "".join(sent) == "Let me look. "
    assert stream.raw.endswith("</tool_call>")


def test_malformed_tool_calls_are_sent_at_the_end(tokenizer: ChatTokenizer) -> None:
    for text in ("a <tool", "see <tool_call>{broken</tool_call> there", "stop <tool_call>{"):
        sent, _ = _stream(tokenizer, text)
        assert "".join(sent) == text
        assert "<" not in "".join(sent[:-1])


def test_special_tokens_are_not_text(tokenizer: ChatTokenizer) -> None:
    sent, _ = _stream(tokenizer, "yes<|user|>")
    assert "".join(sent) == "yes"
