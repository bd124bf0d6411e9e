"""Conversion between the messages of sessions.proto, the REST API's bodies and public values.

Driven by the descriptors: fields have the same names, so a new one needs no code here. A field of
type Duration ends in `duration` or `timeout` where REST has `seconds`, or REST adds `_seconds` to its
name; enums are REST's words.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value
from pydantic import BaseModel
from pydantic_core import from_json

from gateway.rest.schemas.public import PublicValue, to_dict
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb

MessageT = TypeVar("MessageT", bound=Message)
BodyT = TypeVar("BodyT", bound=BaseModel)
Json = dict[str, Any]

# Fields of a request that are not of its body: the path and the headers in REST.
_OUTSIDE_THE_BODY = frozenset({"session", "idempotency_key"})
_DURATION = "google.protobuf.Duration"
_TIMESTAMP = "google.protobuf.Timestamp"
_STRUCT = Struct.DESCRIPTOR.full_name
# Wrappers that tell an empty list or map from one that is not set.
_WRAPPERS = frozenset({pb.Metadata.DESCRIPTOR.full_name, pb.RepairTriggers.DESCRIPTOR.full_name})
# Doubles hold all integers up to here.
_EXACT = 2**53


def parse_body(kind: type[BodyT], request: Message) -> BodyT:
    """Check a request against a REST body. Raises pydantic's ValidationError with REST's paths."""
    values = read_message(request)
    return kind.model_validate({k: v for k, v in values.items() if k not in _OUTSIDE_THE_BODY})


def build_message(kind: type[MessageT], value: PublicValue) -> MessageT:
    """Convert a public value to a message."""
    return fill_message(kind(), to_dict(value))


def read_message(message: Message) -> Any:
    """Return the fields that are set, under their names and in the form of REST."""
    fields = cast("Iterable[tuple[FieldDescriptor, Any]]", message.ListFields())
    values = {_rest_name(field): _read_field(field, value) for field, value in fields}
    return _TO_REST.get(message.DESCRIPTOR.full_name, _same)(values)


def fill_message(message: MessageT, values: Mapping[str, Any]) -> MessageT:
    """Set the fields of `message` from values in the form of REST; None leaves one unset."""
    values = _FROM_REST.get(message.DESCRIPTOR.full_name, _same)(dict(values))
    for field in cast("Iterable[FieldDescriptor]", message.DESCRIPTOR.fields):
        value = values.get(_rest_name(field))
        if value is not None:
            _set_field(message, field, value)
    return message


def find_field(descriptor: Descriptor, path: str) -> str:
    """Convert the path of a field in a REST body (`messages[0].role`) to that in a message.

    A part that the message does not have stays as it is.
    """
    found: list[str] = []
    within: Descriptor | None = descriptor
    for part in path.split("."):
        name, bracket, index = part.partition("[")
        if name == "function" and within in _FLAT:
            continue
        field = None if within is None else _find(within, name)
        found.append((name if field is None else field.name) + bracket + index)
        within = None if field is None else field.message_type
    return ".".join(found)


def _find(within: Descriptor, name: str) -> FieldDescriptor | None:
    return next((field for field in within.fields if _rest_name(field) == name), None)


def _rest_name(field: FieldDescriptor) -> str:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        kind = kind.fields_by_name["value"].message_type
    if kind is None or kind.full_name != _DURATION:
        return field.name
    name, replaced = re.subn(r"(durations?|timeout)$", "seconds", field.name)
    return name if replaced else f"{name}_seconds"


def _read_field(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {str(key): each for key, each in value.items()}  # no request has one of messages
    if field.is_repeated:
        return [_read_value(field, each) for each in value]
    return _read_value(field, value)


def _read_value(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        return _read_word(field.enum_type, value)
    if field.message_type is None:
        return value
    name = field.message_type.full_name
    if name == _DURATION:
        return value.seconds + value.nanos / 1e9
    if name == _STRUCT:
        return _read_struct(value)
    if name in _WRAPPERS:
        return _read_field(value.DESCRIPTOR.fields_by_name["values"], value.values)
    return read_message(value)


def _read_word(kind: EnumDescriptor, number: int) -> str:
    """Return REST's word of an enum's value; of one that it does not have, the number."""
    known = kind.values_by_number.get(number)
    return str(number) if known is None else known.name.removeprefix(_prefix(kind)).lower()


def _prefix(kind: EnumDescriptor) -> str:
    return kind.values_by_number[0].name.removesuffix("UNSPECIFIED")


def _read_struct(struct: Struct) -> Json | str:
    """Return a JSON object; a text, which no body accepts in its place, for numbers out of JSON."""
    try:
        return {name: _read_json(value) for name, value in struct.fields.items()}
    except ValueError as error:
        return str(error)


def _read_json(value: Value) -> Any:
    """Return a JSON value, whole numbers as integers. Raises ValueError for NaN and infinity."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return {name: _read_json(each) for name, each in value.struct_value.fields.items()}
        case "list_value":
            return [_read_json(each) for each in value.list_value.values]
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise ValueError("not a number of JSON")
            return int(number) if number.is_integer() and abs(number) <= _EXACT else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def _set_field(message: Message, field: FieldDescriptor, value: Any) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(target, field.message_type.fields_by_name["value"], value)
    elif field.is_repeated and field.message_type is None:
        target.extend(_to_scalar(field, each) for each in value)
    elif field.is_repeated:
        for each in value:
            _set_value(target.add(), each)
    elif field.message_type is None:
        setattr(message, field.name, _to_scalar(field, value))
    else:
        target.SetInParent()
        _set_value(target, value)


def _set_map(target: Any, kind: FieldDescriptor, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if kind.message_type is None:
            target[name] = value
        else:
            _set_value(target[name], value)


def _set_value(message: Any, value: Any) -> None:
    name = message.DESCRIPTOR.full_name
    if name == _DURATION:
        message.FromNanoseconds(round(value * 1e9))
    elif name == _TIMESTAMP:
        message.FromDatetime(value)
    elif name == _STRUCT:
        message.update(value)
    elif name in _WRAPPERS:
        _set_field(message, message.DESCRIPTOR.fields_by_name["values"], value)
    else:
        fill_message(message, value)


def _to_scalar(field: FieldDescriptor, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(value)
    if field.enum_type is None:
        return value
    word = str(value).rpartition(".")[2]  # `tool_call.started` is EVENT_TYPE_STARTED
    known = field.enum_type.values_by_name.get(_prefix(field.enum_type) + word.upper())
    return 0 if known is None else known.number


def _same(values: Json) -> Json:
    return values


def _call_to_rest(values: Json) -> Json:
    function = {name: values.pop(name) for name in ("name", "arguments") if name in values}
    return {**values, "function": function}


def _call_from_rest(values: Json) -> Json:
    return {**values.get("function", {}), **values}


def _tool_to_rest(values: Json) -> Json:
    if "parameters" in values:
        values["parameters"] = _parse_object(values["parameters"])
    return {"function": values}


def _parse_object(text: str) -> Any:
    """Parse JSON text; one that is no JSON stays a text, which the body refuses."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def _tool_from_rest(values: Json) -> Json:
    function = values["function"]
    if function.get("parameters") is None:
        return dict(function)
    return {**function, "parameters": json.dumps(function["parameters"])}


def _episodes_to_rest(values: Json) -> Json:
    if values.pop("auto_count", False):
        values["count"] = "auto"
    return values


def _episodes_from_rest(values: Json) -> Json:
    if values["count"] == "auto":
        del values["count"]
        values["auto_count"] = True
    return values


def _choice_to_rest(values: Json) -> Any:
    mode = values.get("mode", "auto")
    if "tools" not in values:
        return mode
    tools = [{"type": "function", "function": {"name": name}} for name in values["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _format_to_rest(values: Json) -> Json:
    if "json_schema" in values:
        schema = values["json_schema"]
        parsed = {**schema, "schema": _parse_object(schema.get("schema", ""))}
        return {"type": "json_schema", "json_schema": parsed}
    return {"type": "json_object" if values.get("json_object") else "text"}


def _logprob_from_rest(values: Json) -> Json:
    return {**values, "utf8": values["bytes"]}


def _research_to_rest(values: Json) -> Json:
    if values.pop("no_episodes", False):
        values["episodes"] = None
    return values


def _create_to_rest(values: Json) -> Json:
    if values.get("budget") == 0:
        values["budget"] = "auto"
    return values


def _session_from_rest(values: Json) -> Json:
    return {**values, "budget": 0 if values["budget"] == "auto" else values["budget"]}


# Messages that are flatter than REST's objects, which are OpenAI's, or have a field for a word.
_FLAT = (pb.ToolCall.DESCRIPTOR, pb.Tool.DESCRIPTOR)
_TO_REST: Mapping[str, Callable[[Json], Any]] = MappingProxyType(
    {
        pb.ToolCall.DESCRIPTOR.full_name: _call_to_rest,
        pb.Tool.DESCRIPTOR.full_name: _tool_to_rest,
        pb.EpisodeSettings.DESCRIPTOR.full_name: _episodes_to_rest,
        pb.CreateSessionRequest.DESCRIPTOR.full_name: _create_to_rest,
        pb.Research.DESCRIPTOR.full_name: _research_to_rest,
        pb.ToolChoice.DESCRIPTOR.full_name: _choice_to_rest,
        pb.ResponseFormat.DESCRIPTOR.full_name: _format_to_rest,
    }
)
_FROM_REST: Mapping[str, Callable[[Json], Json]] = MappingProxyType(
    {
        pb.ToolCall.DESCRIPTOR.full_name: _call_from_rest,
        pb.Tool.DESCRIPTOR.full_name: _tool_from_rest,
        pb.EpisodeSettings.DESCRIPTOR.full_name: _episodes_from_rest,
        pb.TokenLogprob.DESCRIPTOR.full_name: _logprob_from_rest,
        pb.Session.DESCRIPTOR.full_name: _session_from_rest,
    }
)
