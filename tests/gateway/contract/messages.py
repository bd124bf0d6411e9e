"""REST's JSON as messages and back, written apart from the gateway's own conversion."""

import json
from datetime import UTC
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict, ParseDict

from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb

Json = dict[str, Any]
WORDS = {
    "role": "ROLE",
    "build": "EPISODE_BUILD",
    "layer_budgets": "LAYER_BUDGETS",
}


def build_request(kind: type[Any], body: Json, session: str = "", key: str = "") -> Any:
    """Build a request from REST's JSON."""
    values = _to_proto_json(body)
    if kind is pb.CreateSessionRequest:
        values = _to_create(values)
        if "research" in values:
            values["research"] = _to_create(values["research"])
    if kind is pb.ForkSessionRequest and "metadata" in values:
        values["metadata"] = {"values": values["metadata"]}
    values |= {"session": session} if session else {}
    return ParseDict(values | ({"idempotency_key": key} if key else {}), kind())


def _to_create(values: Json) -> Json:
    if "episodes" in values and values["episodes"] is None:
        values = {k: v for k, v in values.items() if k != "episodes"} | {"no_episodes": True}
    elif values.get("episodes", {}).get("count") == "auto":
        others = {k: v for k, v in values["episodes"].items() if k != "count"}
        values = values | {"episodes": others | {"auto_count": True}}
    if values.get("budget") == "auto":
        values = values | {"budget": 0}
    if "repair_on" in values:
        words = [f"REPAIR_TRIGGER_{word.upper()}" for word in values["repair_on"]]
        values = values | {"repair_on": {"values": words}}
    for rest, rpc in (
        ("repair_seconds", "repair_timeout"),
        ("expires_after_seconds", "expires_after"),
    ):
        if rest in values:
            values[rpc] = f"{values.pop(rest)}s"
    return values


def _to_proto_json(body: Json) -> Json:
    values = {
        name: value for name, value in body.items() if value is not None or name == "episodes"
    }
    for name, value in values.items():
        if name in WORDS:
            values[name] = f"{WORDS[name]}_{value.upper()}"
        elif name == "tools":
            values[name] = [_flatten_tool(each["function"]) for each in value]
        elif name == "tool_calls":
            values[name] = [{"id": each.get("id", ""), **each["function"]} for each in value]
        elif name in ("messages", "research", "episodes") and value is not None:
            values[name] = (
                [_to_proto_json(each) for each in value]
                if isinstance(value, list)
                else _to_proto_json(value)
            )
    return values


def _flatten_tool(function: Json) -> Json:
    if "parameters" not in function:
        return function
    return {**function, "parameters": json.dumps(function["parameters"])}


def to_json(message: Any) -> Json:
    """Convert an answer to REST's JSON; members that are null there are left out."""
    values = {
        field.name: _to_value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }
    if isinstance(message, pb.ToolCall):
        function = {"name": message.name, "arguments": message.arguments}
        return {"id": message.id, "type": "function", "function": function}
    if isinstance(message, pb.Tool):
        return {"type": "function", "function": _read_tool(values)}
    if isinstance(message, pb.PastRepair):
        values |= values.pop("repair")
    if isinstance(message, pb.EpisodeSettings) and values.pop("auto_count", False):
        values["count"] = "auto"
    if isinstance(message, pb.Research):
        values["repair_on"] = values["repair_on"]["values"]
        values.pop("no_episodes", None)
    if isinstance(message, pb.Session):
        values["budget"] = values["budget"] or "auto"
    names = {
        "duration": "seconds",
        "durations": "seconds",
        "repair_timeout": "repair_seconds",
        "expires_after": "expires_after_seconds",
    }
    return {names.get(name, name): value for name, value in values.items()}


def _to_value(field: FieldDescriptor, value: Any) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        of = kind.fields_by_name["value"]
        return {name: _to_single(of, each) for name, each in value.items()}
    if field.is_repeated:
        return [_to_single(field, each) for each in value]
    return _to_single(field, value)


def _to_single(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        first, this = (field.enum_type.values_by_number[number].name for number in (0, value))
        word = this.removeprefix(first.removesuffix("UNSPECIFIED")).lower()
        return None if word == "unspecified" else word
    if field.message_type is None:
        return value
    match field.message_type.name:
        case "Duration":
            return value.ToNanoseconds() / 1e9
        case "Timestamp":
            return value.ToDatetime(UTC).isoformat()
        case "Struct":
            return MessageToDict(value)
        case _:
            return to_json(value)


def _read_tool(values: Json) -> Json:
    if "parameters" in values:
        values["parameters"] = json.loads(values["parameters"])
    return values
