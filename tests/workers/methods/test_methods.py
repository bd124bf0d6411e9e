"""Methods by name: their settings, what they observe and how they describe themselves."""

import json
from dataclasses import fields
from typing import Any

import pytest

from kvrecall.domain.settings.methods import METHOD_SETTINGS
from workers import methods
from workers.errors import BadSettings, UnknownMethod
from workers.primitives.observation import Observation

NAMES = list(methods.METHODS)


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("snapkv", '{"window": 0}', "window"),
        ("snapkv", '{"pool": 64}', "pool"),
        ("snapkv", '{"group": "median"}', "group"),
        ("pyramidkv", '{"pooling": "sum"}', "pooling"),
        ("adakv", '{"floor": 1.5}', "floor"),
        ("h2o", '{"recent": 64}', "recent"),
        ("chunkkv", '{"chunk": 0}', "chunk"),
        ("infinipot", '{"prompt": ""}', "prompt"),
        ("epicache", '{"reduce": "sum"}', "reduce"),
        ("epicache", '{"topic": -1}', "topic"),
        ("streaming_llm", '{"sinks": -1}', "sinks"),
        ("streaming_llm", '{"sink": 4}', "sink"),
        ("random", "[]", "settings"),
        ("full", "{", "settings"),
    ],
)
def test_bad_settings_are_named(name: str, settings: str, match: str) -> None:
    with pytest.raises(BadSettings, match=match):
        methods.build(name, settings)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownMethod, match=", ".join(NAMES)):
        methods.build("magic")


@pytest.mark.parametrize("name", NAMES)
def test_every_method_describes_itself_and_its_settings(name: str) -> None:
    described = methods.describe(name)
    assert described.name == name
    assert described.summary.endswith(".")
    schema = json.loads(described.settings_schema)
    assert schema["type"] == "object"
    assert methods.build(name, "") == methods.build(name)


def test_summaries_of_methods_differ() -> None:
    assert len({methods.describe(name).summary for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("name", "settings", "observation"),
    [
        ("streaming_llm", "{}", Observation()),
        ("keydiff", "{}", Observation()),
        ("knorm", "{}", Observation()),
        ("snapkv", '{"window": 8}', Observation(window=8)),
        ("pyramidkv", '{"window": 8}', Observation(window=8)),
        ("adakv", '{"window": 8}', Observation(window=8)),
        ("chunkkv", '{"window": 8}', Observation(window=8)),
        ("tova", "{}", Observation(window=1)),
        ("h2o", "{}", Observation(accumulate="attention")),
        ("scissorhands", "{}", Observation(accumulate="hits")),
        ("infinipot", '{"prompt": "Sum up."}', Observation(prompt="Sum up.")),
        ("kvzip", '{"prompt": "Again."}', Observation(prompt="Again.", repeats_block=True)),
        ("epicache", "{}", Observation()),
        (
            "epicache",
            '{"rank": "attention", "prompt": "Look.", "window": 8}',
            Observation(window=8, prompt="Look.", episode=True),
        ),
    ],
)
def test_the_observation_follows_from_the_settings(
    name: str, settings: str, observation: Observation
) -> None:
    assert methods.build(name, settings).observation == observation


def test_layers_are_split_and_shared_as_the_papers_say() -> None:
    split = {name: method.layer_budgets for name, method in methods.METHODS.items()}
    assert {name for name, how in split.items() if how != "uniform"} == {"pyramidkv", "epicache"}
    assert (split["pyramidkv"], split["epicache"]) == ("pyramid", "sensitivity")
    assert methods.build("chunkkv").shares_layers == 2
    assert methods.build("chunkkv", '{"reuse": 1}').shares_layers == 1
    assert {methods.build(name).shares_layers for name in NAMES if name != "chunkkv"} == {1}


def settings_of(kind: Any) -> dict[str, Any]:
    """Type and default of a dataclass's fields."""
    return {each.name: (each.type, each.default) for each in fields(kind)}


def test_the_door_knows_the_settings_of_every_method() -> None:
    assert METHOD_SETTINGS.keys() == methods.METHODS.keys()
    for name, method in methods.METHODS.items():
        constants = {"first", "token_share"} if name == "loopserve" else set()
        own = settings_of(method)
        assert {key: own.pop(key) for key in constants}.keys() == constants
        assert own == settings_of(METHOD_SETTINGS[name])
