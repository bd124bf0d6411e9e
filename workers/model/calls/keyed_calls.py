"""Calls written as in a program, `name(key=value, ..)`: Llama 4, LFM2, OLMo 3; Gemma's are alike."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.model.calls.named_calls import read_name
from workers.model.calls.sink import CallSink
from workers.model.calls.source import CallSource, Reading
from workers.model.calls.values import PYTHON, Values


@dataclass(frozen=True)
class KeyedCalls:
    """Reads calls of which each is a name and values by their keys.

    A `[` before the first call makes them a list up to `]`; without it they follow each other up to
    `ending`, or there is one where that is empty.

    - `before`: before a name; `brackets`: around the arguments; `assign`: between key and value.
    - `ending`: behind the calls.
    """

    values: Values = PYTHON
    before: str = ""
    brackets: tuple[str, str] = ("(", ")")
    assign: str = "="
    ending: str = ""

    def __call__(self, source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
        """Read calls."""
        listed = yield from source.take_if("[")
        more = True
        while more:
            yield from self._read_call(source, sink)
            more = yield from source.take_if(",")
            if not more and not listed and self.ending:
                more = (yield from source.peek_word()) not in ("", self.ending[0])
        if listed:
            yield from source.expect("]")
        if self.ending:
            yield from source.expect(self.ending)

    def _read_call(self, source: CallSource, sink: CallSink) -> Reading[None]:
        yield from source.expect(self.before)
        name = yield from read_name(source)
        yield from source.expect(self.brackets[0])
        opening = "{"
        more = not (yield from source.take_if(self.brackets[1]))
        while more:
            key = yield from self.values.read_key(source)
            yield from source.expect(self.assign)
            if opening == "{":
                sink.begin(name)
            sink.add(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.values.pass_value(source, sink.add)
            opening = ", "
            more = yield from source.take_if(",")
            if not more:
                yield from source.expect(self.brackets[1])
        if opening == "{":
            sink.begin(name)
            sink.add("{")
        sink.add("}")
        sink.end()
