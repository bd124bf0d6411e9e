"""Calls with each parameter between tags, its value as it is: Qwen3 Coder, GLM, MiniMax."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from workers.model.calls.sink import CallSink
from workers.model.calls.source import CallSource, Malformed, Reading
from workers.model.calls.tools import get_property, is_text
from workers.model.calls.values import write_text, write_value

# A name may have any character of a tool's name, and none of JSON's or of a tag's.
_NAME = re.compile(r"""[^\s{}\[\]"<>]+""")


@dataclass(frozen=True)
class TaggedCalls:
    """Reads a name and parameters, such as `<function=name><parameter=key>value</parameter>..`.

    A value is text if the tool's schema says so, else JSON where it can be read as such. All closing
    tags begin with `</`.

    - `call`: texts before the name, behind it, and at the call's end.
    - `parameter`: texts before a key, behind it, and at the value's end; `value`: one before the value.
    - `ending`: behind the calls; `several`: calls follow each other before it.
    - `padded`: values stand on lines of their own.
    """

    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    value: str = ""
    ending: str = ""
    several: bool = False
    padded: bool = False

    def __call__(self, source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
        """Read calls."""
        yield from source.expect(self.call[0])
        opening = True
        while opening:
            yield from self._read_call(source, sink, tools)
            if not self.ending:
                return
            following = (self.ending, self.call[0]) if self.several else (self.ending,)
            opening = (yield from source.expect_one(following)) != self.ending

    def _read_call(self, source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
        name = yield from self._read_between(source, self.call[1])
        if not _NAME.fullmatch(name):
            raise Malformed
        opening = "{"
        while True:
            yield from source.expect("<")
            if (yield from source.peek()) == "/":
                break
            yield from source.expect(self.parameter[0][1:])
            key = yield from self._read_between(source, self.parameter[1])
            if self.value:
                yield from source.expect(self.value)
            if opening == "{":
                sink.begin(name)
            sink.add(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._read_value(source, sink, get_property(tools, name, key))
            opening = ", "
        yield from source.expect(self.call[2][1:])
        if opening == "{":
            sink.begin(name)
            sink.add("{")
        sink.add("}")
        sink.end()

    def _read_between(self, source: CallSource, closing: str) -> Reading[str]:
        """Take a name or a key, and what closes it."""
        text = yield from source.read_while(_up_to(closing[:1] or "<"))
        if closing:
            yield from source.expect(closing)
        return text.strip()

    def _read_value(
        self, source: CallSource, sink: CallSink, schema: dict[str, Any]
    ) -> Reading[None]:
        """Read a value with its closing tag, which may be missing where lines end before the next."""
        closing = self.parameter[2]
        ends: tuple[str, ...] = (closing,)
        if self.padded:
            ends = (f"\n{closing}", closing, f"\n{self.parameter[0]}", f"\n{self.call[2]}")
            if (yield from source.peek()) == "\n":
                source.take(1)
        if is_text(schema):
            sink.add('"')
            ending = yield from source.read_until(ends, lambda text: sink.add(write_text(text)))
            sink.add('"')
        else:
            pieces: list[str] = []
            ending = yield from source.read_until(ends, pieces.append)
            sink.add(write_value("".join(pieces)))
        if ending.endswith(closing):
            source.take(len(ending))


@cache
def _up_to(char: str) -> re.Pattern[str]:
    return re.compile(f"[^{re.escape(char)}\n]*")
