"""Calls that are a name and, behind a mark, a JSON object: Mistral, DeepSeek, Kimi, gpt-oss."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.model.calls.sink import CallSink
from workers.model.calls.source import CallSource, Malformed, Reading
from workers.model.calls.values import JSON

_WORDS = re.compile(r"[\w.:-]*")
_WORD = re.compile(r"\w*")
_BETWEEN_MARKS = re.compile(r"[ \w]*")
_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::(\d+))?")


@dataclass(frozen=True)
class NamedCalls:
    """Reads `name`, a mark and `{..}`, once, or as often as a call opens within one section.

    - `opening`: before each call, `closing`: behind it, `ending`: behind the section.
    - `before`: between the opening and the name, `between`: before the arguments.
    - `numbered`: the name is written as `functions.name:0`.
    """

    between: str
    before: str = ""
    closing: tuple[str, ...] = ()
    opening: str = ""
    ending: str = ""
    numbered: bool = False

    def __call__(self, source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
        """Read calls."""
        yield from source.expect(self.opening)
        more = True
        while more:
            yield from self._read_call(source, sink)
            following = (self.opening, self.ending)
            more = bool(self.ending) and (yield from source.expect_one(following)) == self.opening

    def _read_call(self, source: CallSource, sink: CallSink) -> Reading[None]:
        yield from source.expect(self.before)
        written = yield from read_name(source)
        found = _NUMBERED.fullmatch(written) if self.numbered else None
        name, number = found.groups(default="") if found else (written, "")
        yield from source.expect(self.between)
        yield from read_object(source, sink, name, number)
        for text in self.closing:
            yield from source.expect(text)


def read_mistral_args(source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
    """Read `name[ARGS]{..}` or `name[CALL_ID]id[ARGS]{..}`."""
    name = yield from read_name(source)
    if (yield from source.expect_one(("[ARGS]", "[CALL_ID]"))) == "[CALL_ID]":
        yield from source.read_while(_WORD)
        yield from source.expect("[ARGS]")
    yield from read_object(source, sink, name)


def read_harmony(source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
    """Read `name`, the rest of the message's header, and `{..}`.

    The header may have its channel and its type of content in any order.
    """
    name = yield from read_name(source)
    mark = ""
    while mark != "<|message|>":
        yield from source.read_while(_BETWEEN_MARKS)
        mark = yield from source.expect_one(("<|message|>", "<|channel|>", "<|constrain|>"))
    yield from read_object(source, sink, name)


def read_name(source: CallSource) -> Reading[str]:
    """Take white space and a name behind it. Raises Malformed."""
    yield from source.peek_word()
    name = yield from source.read_while(_WORDS)
    if not name:
        raise Malformed
    return name


def read_object(source: CallSource, sink: CallSink, name: str, number: str = "") -> Reading[None]:
    """Read a call's arguments, which are a JSON object. Raises Malformed."""
    if (yield from source.peek_word()) != "{":
        raise Malformed
    sink.begin(name, number)
    yield from JSON.pass_value(source, sink.add)
    sink.end()
