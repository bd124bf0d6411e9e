"""Eviction methods by name. A new one is a file beside this and a line in `METHODS`."""

import json
from collections.abc import Mapping
from types import MappingProxyType

from pydantic import TypeAdapter, ValidationError

from kvrecall.v1 import worker_pb2 as wire
from workers.errors import BadSettings, UnknownMethod
from workers.methods.adakv import AdaKV
from workers.methods.base import LayerRows, Method
from workers.methods.chunkkv import ChunkKV
from workers.methods.epicache import EpiCache
from workers.methods.full import Full
from workers.methods.h2o import H2O
from workers.methods.infinipot import InfiniPot
from workers.methods.keydiff import KeyDiff
from workers.methods.knorm import KNorm
from workers.methods.kvzip import KVzip
from workers.methods.oldest import Oldest
from workers.methods.pyramidkv import PyramidKV
from workers.methods.random import Random
from workers.methods.scissorhands import Scissorhands
from workers.methods.snapkv import SnapKV
from workers.methods.streaming_llm import StreamingLLM
from workers.methods.tova import TOVA

_ALL: tuple[type[Method], ...] = (
    Full,
    StreamingLLM,
    H2O,
    SnapKV,
    PyramidKV,
    AdaKV,
    KeyDiff,
    InfiniPot,
    KVzip,
    ChunkKV,
    Scissorhands,
    EpiCache,
    TOVA,
    KNorm,
    Random,
    Oldest,
)
METHODS: Mapping[str, type[Method]] = MappingProxyType({method.name: method for method in _ALL})

__all__ = ["METHODS", "LayerRows", "Method", "build", "describe"]


def build(name: str, settings: str = "{}") -> Method:
    """Make a method from its name and its settings, a JSON object as text.

    Raises UnknownMethod, or BadSettings naming the setting that is off.
    """
    if name not in METHODS:
        raise UnknownMethod(f"there is no method {name!r}; the methods are {', '.join(METHODS)}")
    try:
        method: Method = TypeAdapter(METHODS[name]).validate_json(settings or "{}")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the settings"
        raise BadSettings(f"method_settings of {name}: {field}: {first['msg']}") from error
    return method


def describe(name: str) -> wire.MethodInfo:
    """A method's name, the first line of its docstring, the JSON schema of its settings, whether it uses episodes."""
    method = METHODS[name]
    summary = (method.__doc__ or "").strip().split("\n")[0]
    schema = json.dumps(TypeAdapter(method).json_schema())
    return wire.MethodInfo(name=name, summary=summary, settings_schema=schema, episodes=method.has_episodes)
