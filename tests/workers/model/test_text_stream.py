"""A text stream sends whole characters, without tool calls, up to a stop string."""

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.model.reasoning_stream import ReasoningStream
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
    return [*sent, *(piece.text for piece in stream.finish())], stream


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


def test_the_whole_answer_begins_as_its_pieces_do(tokenizer: ChatTokenizer) -> None:
    """White space there may be the indentation of code."""
    sent, stream = _stream(tokenizer, "    return 1\n\n")
    assert "".join(sent) == "    return 1\n\n"
    assert stream.parse().text == "    return 1"


def test_a_tool_call_is_not_sent(tokenizer: ChatTokenizer) -> None:
    call = '<tool_call>{"name": "lookup", "arguments": {"city": "Oslo"}}</tool_call>'
    sent, stream = _stream(tokenizer, f"Let me look. {call}")
    assert "".join(sent) == "Let me look. "
    assert stream.raw.endswith("</tool_call>")


def test_malformed_tool_calls_are_sent_once_they_are_known_to_be(tokenizer: ChatTokenizer) -> None:
    for text in ("a <tool", "stop <tool_call>{", 'so <tool_call>{"name": "f"'):
        sent, _ = _stream(tokenizer, text)
        assert "".join(sent) == text
        assert "<" not in "".join(sent[:-1])
    sent, _ = _stream(tokenizer, "see <tool_call>{broken</tool_call> there")
    assert "".join(sent) == "see <tool_call>{broken</tool_call> there"
    marked = next(piece for piece in sent if "<tool_call>" in piece)
    assert marked.startswith("<tool_call>{"), "the mark comes with what shows that it opens no call"
    assert sent.index(marked) < len(sent) - 1


def test_special_tokens_are_not_text(tokenizer: ChatTokenizer) -> None:
    sent, _ = _stream(tokenizer, "yes<|user|>")
    assert "".join(sent) == "yes"


@pytest.mark.parametrize("before", ["", "<tool_call>", "<think>", "\n" * 9])
def test_what_is_looked_at_again_does_not_grow_with_the_answer(
    before: str, tokenizer: ChatTokenizer
) -> None:
    inner = deepcopy(tokenizer.inner)
    inner.chat_template += "</think>"
    stop = "no more words"
    stream = TextStream(ChatTokenizer(inner, tokenizer.eos_token_ids), (stop,))
    windows = []
    for token in tokenizer.encode(before + "no more, <tool_c or </thi \n\n" * 100):
        stream.push(token)
        windows.append(stream.window)
    assert 0 < max(windows) < len(stop)


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "</th", " ", "\n", "so"]), max_size=9),
    active=st.sampled_from([None, True, False]),
)
def test_a_reasoning_is_what_is_between_the_first_marks(
    pieces: list[str], active: bool | None
) -> None:
    text = "".join(pieces)
    stream = ReasoningStream(("<think>", "</think>"), active)
    found = [*(stream.push(piece) for piece in pieces), stream.finish()]
    begins = active is None and text.lstrip().startswith("<think>")
    if active or begins:
        inside = text.lstrip().removeprefix("<think>") if begins else text
        reasoning, mark, rest = inside.partition("</think>")
        expected = (reasoning.strip(), rest.lstrip() if mark else "")
    else:
        expected = ("", text)
    assert tuple(map("".join, zip(*found, strict=True))) == expected
    assert stream.text == expected[0]
