"""Reading of tool calls in a model's text, one function per form.

Each reads the text behind the mark that opens a call, and begins, adds to and ends the calls that it
finds there. It raises Malformed where the text is of another form: what it has begun by then stays
a call.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response

from workers.model.call_source import CallSource, Malformed, Reading


@dataclass(frozen=True)
class ParsedCall:
    """A tool call in the model's output.

    `arguments` is the JSON text of an object, or its beginning unless the call is `complete`.
    """

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True)
class CallPiece:
    """What new text adds to the arguments of call number `index`.

    The first piece of a call begins it. `call`: the whole call, with its last piece.
    """

    index: int
    name: str
    arguments: str
    call: ParsedCall | None = None


class CallSink:
    """The calls that were found, and what is new of them.

    Attributes:
        calls: Calls that have ended.
        names: Names that a call may have; None: any.
        open: True within a call's arguments.
    """

    def __init__(self) -> None:
        self.calls: list[ParsedCall] = []
        self.names: Collection[str] | None = None
        self.open = False
        self._name = ""
        self._arguments: list[str] = []
        self._taken = 0
        self._pieces: list[CallPiece] = []

    @property
    def begun(self) -> int:
        """Number of calls that were begun."""
        return len(self.calls) + self.open

    def begin(self, name: str) -> None:
        """Begin a call. Raises Malformed for a name that it may not have."""
        if self.names is not None and name not in self.names:
            raise Malformed
        self.open = True
        self._name = name
        self._arguments = []
        self._taken = 0

    def add(self, text: str) -> None:
        """Add to the arguments of the call."""
        self._arguments.append(text)

    def end(self, *, complete: bool = True) -> None:
        """End the call; one that is not `complete` was cut off or is malformed from here on."""
        call = ParsedCall(self._name, "".join(self._arguments), complete)
        self._pieces.append(self._take_piece(call))
        self.calls.append(call)
        self.open = False

    def take(self) -> tuple[CallPiece, ...]:
        """Return what is new since the last time."""
        pieces, self._pieces = self._pieces, []
        if self.open and self._taken < len(self._arguments):
            pieces.append(self._take_piece(None))
        return tuple(pieces)

    def _take_piece(self, call: ParsedCall | None) -> CallPiece:
        fresh = "".join(self._arguments[self._taken :])
        self._taken = len(self._arguments)
        return CallPiece(len(self.calls), self._name, fresh, call)


Reader = Callable[[CallSource, CallSink, Sequence[Any]], Reading[None]]
_TAG_NAME = re.compile(r"[^>\n]*")
_CALL_NAME = re.compile(r"[\w.:-]*")
_WORD = re.compile(r"\w*")
_PARAMETER_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")


def read_hermes(source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
    """Read `{"name": .., "arguments": {..}}</tool_call>`."""
    yield from _read_call(source, sink, ("arguments",))
    yield from source.expect("</tool_call>")


def read_llama(source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
    """Read `{"name": .., "parameters": {..}}`, several of them with a semicolon between."""
    more = True
    while more:
        yield from _read_call(source, sink, ("parameters", "arguments"), others=("type",))
        more = yield from source.take_if(";")


def read_mistral(source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
    """Read `[{"name": .., "arguments": {..}}, ..]`."""
    yield from source.expect("[")
    more = True
    while more:
        yield from _read_call(source, sink, ("arguments",))
        more = yield from source.take_if(",")
    yield from source.expect("]")


def read_mistral_args(source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
    """Read `name[ARGS]{..}`, or the older array."""
    if (yield from source.peek_word()) == "[":
        yield from read_mistral(source, sink, tools)
        return
    name = yield from source.read_while(_CALL_NAME)
    yield from source.expect("[")
    if (yield from source.take_if("C")):
        yield from source.expect("ALL_ID]")
        yield from source.read_while(_WORD)
        yield from source.expect("[")
    yield from source.expect("ARGS]")
    if not name or (yield from source.peek_word()) != "{":
        raise Malformed
    sink.begin(name)
    yield from source.pass_value(sink.add)
    sink.end()


def read_qwen_xml(source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
    """Read `<function=name><parameter=key>value</parameter>..</function></tool_call>`.

    A value is text if the tool's schema says so, else JSON where it can be read as such.
    """
    yield from source.expect("<function=")
    name = (yield from source.read_while(_TAG_NAME)).strip()
    yield from source.expect(">")
    opening = "{"
    while True:
        yield from source.expect("<")
        if (yield from source.peek()) == "/":
            break
        yield from source.expect("parameter=")
        key = (yield from source.read_while(_TAG_NAME)).strip()
        yield from source.expect(">")
        if opening == "{":
            sink.begin(name)
        sink.add(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _read_parameter(source, sink, get_property(tools, name, key))
        opening = ", "
    yield from source.expect("/function>")
    if opening == "{":
        sink.begin(name)
        sink.add("{")
    sink.add("}")
    sink.end()
    yield from source.expect("</tool_call>")


def read_template_region(
    source: CallSource,
    sink: CallSink,
    tools: Sequence[Any],
    mark: str,
    close: str,
    template: dict[str, Any],
) -> Reading[None]:
    """Read a region of a tokenizer's own `response_template` up to its end, where it is parsed."""
    pieces: list[str] = []
    yield from source.read_until((close,), pieces.append)
    region = f"{mark}{''.join(pieces)}{close}"
    source.take(len(close))
    try:
        message = parse_response(region, template, prefix="", tools=list(tools) or None)
        found = [_to_call(call.get("function", call)) for call in message["tool_calls"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed from error
    if not found:
        raise Malformed
    for name, arguments in found:
        sink.begin(name)
        sink.add(arguments)
        sink.end()


def get_name(tool: Any) -> str:
    """Return the name of a tool; an empty one if there is none."""
    return str(_get_function(tool).get("name", ""))


def get_parameters(tools: Sequence[Any], name: str) -> dict[str, Any]:
    """Return the schema of a tool's parameters; an empty one if there is none."""
    for tool in map(_get_function, tools):
        if tool.get("name") == name and isinstance(tool.get("parameters"), dict):
            parameters: dict[str, Any] = tool["parameters"]
            return parameters
    return {}


def get_property(tools: Sequence[Any], name: str, key: str) -> dict[str, Any]:
    """Return the schema of one parameter of a tool; an empty one if there is none."""
    properties = get_parameters(tools, name).get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def is_text(schema: dict[str, Any]) -> bool:
    """Return whether a parameter's value is written as it is: text that is not one of a choice."""
    return schema.get("type") == "string"


def _get_function(tool: Any) -> dict[str, Any]:
    found = tool.get("function", tool) if isinstance(tool, dict) else {}
    return found if isinstance(found, dict) else {}


def _read_call(
    source: CallSource,
    sink: CallSink,
    argument_names: Sequence[str],
    others: Collection[str] | None = None,
) -> Reading[None]:
    """Read an object with a name and arguments, in any order.

    argument_names: the first member of one of these has them; others: members that it may have
    besides; None: any.
    """
    yield from source.expect("{")
    number = sink.begun
    name: str | None = None
    held: list[str] = []  # arguments that came before the name
    more = not (yield from source.take_if("}"))
    while more:
        member = yield from source.read_text()
        yield from source.expect(":")
        if member == "name":
            name = yield from source.read_text()
        elif member in argument_names and not held and sink.begun == number:
            if (yield from source.peek_word()) != "{":
                raise Malformed
            if name is None:
                yield from source.pass_value(held.append)
            else:
                sink.begin(name)
                yield from source.pass_value(sink.add)
                sink.end()
        elif others is None or member in others or member in argument_names:
            yield from source.pass_value(_leave_out)
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


def _read_parameter(source: CallSource, sink: CallSink, schema: dict[str, Any]) -> Reading[None]:
    """Read a parameter's value with its closing tag, which may be missing before the next tag."""
    if (yield from source.peek()) == "\n":
        source.take(1)
    if is_text(schema):
        sink.add('"')
        ending = yield from source.read_until(_PARAMETER_ENDS, lambda text: sink.add(_quote(text)))
        sink.add('"')
    else:
        pieces: list[str] = []
        ending = yield from source.read_until(_PARAMETER_ENDS, pieces.append)
        sink.add(_write_value("".join(pieces)))
    if ending.endswith("</parameter>"):
        source.take(len(ending))


def _leave_out(text: str) -> None:
    """Pass nothing on."""


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _write_value(text: str) -> str:
    """Write a value as JSON, or as a text where it is none."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _to_call(value: Any) -> tuple[str, str]:
    """Return a call's name and arguments. Raises KeyError, TypeError and ValueError."""
    name, arguments = value["name"], value.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a call has a name and an object of arguments")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
