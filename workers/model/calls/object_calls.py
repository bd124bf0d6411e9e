"""Calls that are JSON objects with a name and arguments: Hermes, Llama, Mistral, Granite, Nemotron."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from workers.model.calls.sink import CallSink
from workers.model.calls.source import CallSource, Malformed, Reading
from workers.model.calls.values import JSON


@dataclass(frozen=True)
class ObjectCalls:
    """Reads `{"name": .., "arguments": {..}}`, the members in any order.

    - `members`: the first member of one of these names has the arguments.
    - `others`: members that a call may have besides; None: any.
    - `listed`: calls are items of an array; `separator`: else, what is between two of them; empty: a
      mark has one call.
    - `closing`: behind the calls.
    """

    members: Sequence[str] = ("arguments",)
    others: Collection[str] | None = None
    listed: bool = False
    separator: str = ""
    closing: str = ""

    def __call__(self, source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
        """Read calls."""
        separator = "," if self.listed else self.separator
        if self.listed:
            yield from source.expect("[")
        more = True
        while more:
            yield from self._read_call(source, sink)
            more = bool(separator) and (yield from source.take_if(separator))
        if self.listed:
            yield from source.expect("]")
        if self.closing:
            yield from source.expect(self.closing)

    def _read_call(self, source: CallSource, sink: CallSink) -> Reading[None]:
        yield from source.expect("{")
        number = sink.begun
        name: str | None = None
        held: list[str] = []  # arguments that came before the name
        more = not (yield from source.take_if("}"))
        while more:
            member = yield from JSON.read_text(source)
            yield from source.expect(":")
            if member == "name":
                name = yield from JSON.read_text(source)
            elif member in self.members and not held and sink.begun == number:
                yield from self._read_arguments(source, sink, name, held)
            elif self.others is None or member in self.others or member in self.members:
                yield from JSON.pass_value(source, _leave_out)
            else:
                raise Malformed
            more = yield from source.take_if(",")
            if not more:
                yield from source.expect("}")
        if sink.begun == number:
            if name is None:
                raise Malformed
            sink.begin(name)
            sink.add("".join(held) or "{}")
            sink.end()

    def _read_arguments(
        self, source: CallSource, sink: CallSink, name: str | None, held: list[str]
    ) -> Reading[None]:
        """Read arguments into the call, or hold them until its name is known."""
        if (yield from source.peek_word()) != "{":
            raise Malformed
        if name is None:
            yield from JSON.pass_value(source, held.append)
            return
        sink.begin(name)
        yield from JSON.pass_value(source, sink.add)
        sink.end()


def _leave_out(text: str) -> None:
    """Pass nothing on."""
