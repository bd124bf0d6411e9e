"""Models and options of the client agree with the OpenAPI description."""

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

import httpx
import pytest

from kvrecall import client as client_package
from kvrecall.client import inspection, models, options, sessions, workers
from kvrecall.client._parsing import parse

MODELS = [
    kind
    for module in (inspection, models, sessions, workers)
    for kind in vars(module).values()
    if is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__
]
# Message is sent and received: it has the fields of the request. The others are of a response, whose
# schema has their name.
RESPONSES = [model for model in MODELS if model is not models.Message]
OPTIONS = {
    sessions.EpisodeOptions: ("EpisodesBody", set()),
    options.Logprobs: ("LogprobsBody", set()),
    sessions.ReselectionOptions: ("ReselectionBody", set()),
    sessions.ResearchOptions: ("ResearchBody", set()),
    sessions.SessionOptions: ("CreateSessionBody", set()),
    options.TurnOptions: ("TurnBody", {"messages", "stream"}),
}
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


@pytest.fixture(scope="module")
def schemas(live_url: str) -> dict[str, Any]:
    """Schemas of the served OpenAPI description."""
    description = httpx.get(f"{live_url}/openapi.json").json()
    schemas: dict[str, Any] = description["components"]["schemas"]
    return schemas


def json_types(hint: Any) -> set[str]:
    """JSON types that a field of this type can hold; a dataclass by its name."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return set().union(*[json_types(kind) for kind in get_args(hint)])
    if origin is NotRequired:
        return json_types(get_args(hint)[0])
    if origin is Literal:
        return {JSON_TYPES[type(value)] for value in get_args(hint)}
    if hint is type(None):
        return {"null"}
    if hint is datetime:
        return {"string"}
    if is_dataclass(hint) or typing.is_typeddict(hint):
        return {hint.__name__}
    if origin is not None and issubclass(origin, Mapping | dict):
        return {"object"}
    if origin is not None:
        return {"array"}
    return {JSON_TYPES[hint]}


def schema_types(schema: Mapping[str, Any], names: Mapping[str, str]) -> set[str]:
    """JSON types that a schema allows; a reference by the name of its model."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return {names.get(name, "object")}
    if "anyOf" in schema:
        return set().union(*[schema_types(each, names) for each in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return {"string"}
    return {schema["type"]}


def check_fields(
    hints: Mapping[str, Any], schema: Mapping[str, Any], names: Mapping[str, str], model: str
) -> None:
    """Assert that every field exists in the schema with the same types."""
    for name, hint in hints.items():
        assert name in schema["properties"], f"{model}.{name} is not in the schema"
        expected = schema_types(schema["properties"][name], names)
        # An absent list is empty in a model.
        known = json_types(hint) | ({"null"} if "array" in json_types(hint) else set())
        assert expected <= known, f"{model}.{name}: {expected} in the schema, {known} here"


NAMES = {model.__name__: model.__name__ for model in RESPONSES} | {
    "AssistantMessage": "Message",
    "LoggedMessage": "Message",
    "MessageBody": "Message",
    "ToolCallBody": "ToolCall",
    "EpisodesBody": "EpisodeOptions",
    "LogprobsBody": "Logprobs",
    "ResearchBody": "ResearchOptions",
    "ReselectionBody": "ReselectionOptions",
}


@pytest.mark.parametrize("model", RESPONSES, ids=lambda model: model.__name__)
def test_a_models_fields_are_those_of_its_response(model: type, schemas: dict[str, Any]) -> None:
    schema = schemas[model.__name__]
    check_fields(get_type_hints(model), schema, NAMES, model.__name__)
    assert set(schema["required"]) <= set(get_type_hints(model))
    required = {field.name for field in fields(model) if field.default is field.default_factory}
    assert required <= set(schema["required"])


def test_a_message_has_the_fields_of_requests_and_replies(schemas: dict[str, Any]) -> None:
    hints = get_type_hints(models.Message)
    check_fields(hints, schemas["MessageBody"], NAMES, "Message")
    assert set(schemas["AssistantMessage"]["properties"]) <= set(hints)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.__name__)
def test_options_are_the_fields_of_their_request(option: type, schemas: dict[str, Any]) -> None:
    name, handled_elsewhere = OPTIONS[option]
    hints = get_type_hints(option)
    assert set(hints) == set(schemas[name]["properties"]) - handled_elsewhere
    check_fields(hints, schemas[name], NAMES, option.__name__)


def test_every_model_is_exported() -> None:
    assert {model.__name__ for model in MODELS} <= set(client_package.__all__)
    assert client_package.__all__ == sorted(client_package.__all__)


def test_unknown_fields_are_ignored() -> None:
    data = {"prompt_tokens": 1, "output_tokens": 2, "cached_tokens": 3}
    assert parse(models.Usage, data) == models.Usage(1, 2)


def test_messages_survive_the_way_to_json_and_back() -> None:
    call = models.ToolCall("c1", models.Function("f", '{"n": 1}'))
    for message in (
        models.Message.system("s"),
        models.Message.user("u"),
        models.Message.tool("c1", "r"),
        models.Message("assistant", None, (call,)),
    ):
        assert parse(models.Message, message.to_json()) == message
