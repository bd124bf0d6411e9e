"""Eviction methods, repair, prefill and retrieval by name; a new method is one file and one line in `_ALL`."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from kvrecall.domain.settings.invalid import find_invalid
from kvrecall.domain.settings.methods import METHOD_SETTINGS
from kvrecall.domain.settings.prefill import PrefillSettings
from kvrecall.domain.settings.repair import RepairSettings
from kvrecall.domain.settings.retrieval import RetrievalSettings
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.errors import BadSettings, UnknownMethod
from workers.methods.adakv import AdaKV
from workers.methods.base import LayerRows, Method
from workers.methods.chunkkv import ChunkKV
from workers.methods.epicache import EpiCache
from workers.methods.full import Full
from workers.methods.h2o import H2O
from workers.methods.icecache import IceCache
from workers.methods.infinipot import InfiniPot
from workers.methods.keydiff import KeyDiff
from workers.methods.knorm import KNorm
from workers.methods.kvzip import KVzip
from workers.methods.loopserve import LoopServe
from workers.methods.oldest import Oldest
from workers.methods.pyramidkv import PyramidKV
from workers.methods.random import Random
from workers.methods.repairkv import RepairKV
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
    LoopServe,
    IceCache,
    TOVA,
    KNorm,
    Random,
    Oldest,
)
METHODS: Mapping[str, type[Method]] = MappingProxyType({method.name: method for method in _ALL})

__all__ = [
    "METHODS",
    "LayerRows",
    "Method",
    "RepairKV",
    "build",
    "build_repair",
    "describe",
    "describe_error",
    "describe_prefill",
    "describe_repair",
    "describe_retrieval",
]

_T = TypeVar("_T")


def build(name: str, settings: str = "{}") -> Method:
    """Build a method from its name and its settings, a JSON object as text.

    Raises UnknownMethod, or BadSettings naming the invalid setting.
    """
    if name not in METHODS:
        raise UnknownMethod(f"there is no method {name!r}; the methods are {', '.join(METHODS)}")
    return _validate(METHODS[name], settings, f"method_settings of {name}")


def build_repair(settings: str) -> RepairKV:
    """Build a session's repair from its settings, a JSON object as text; empty: the defaults.

    Raises BadSettings naming the invalid setting.
    """
    return _validate(RepairKV, settings, "repair_settings")


def describe(name: str) -> pb.MethodInfo:
    """Describe a method: name, summary, JSON schema of a session's settings, and what follows from its defaults.

    The summary is the first line of the method's docstring.
    """
    method = METHODS[name]
    info = _describe(name, method, METHOD_SETTINGS.get(name, method))
    info.episodes = method.has_episodes
    info.retrieves = build(name).retrieval is not None
    return info


def describe_repair() -> pb.MethodInfo:
    """Describe the repair, as `describe` does for methods."""
    return _describe("repairkv", RepairKV, RepairSettings)


def describe_prefill() -> pb.MethodInfo:
    """Describe the prefill, as `describe` does for methods."""
    return _describe("prefill", PrefillSettings, PrefillSettings)


def describe_retrieval() -> pb.MethodInfo:
    """Describe the retrieval, as `describe` does for methods."""
    return _describe("retrieval", RetrievalSettings, RetrievalSettings)


def _validate(kind: type[_T], settings: str, label: str) -> _T:
    try:
        validated: _T = TypeAdapter(kind).validate_json(settings or "{}")
    except ValidationError as error:
        raise BadSettings(f"{label}: {describe_error(error)}") from error
    return validated


def describe_error(error: ValidationError) -> str:
    """Name the first invalid setting and say what was expected."""
    path, expected = find_invalid(error)
    return f"{path or 'the settings'}: {expected}"


def _describe(name: str, described: type[Any], settings: type[Any]) -> pb.MethodInfo:
    summary = (described.__doc__ or "").strip().split("\n")[0]
    schema = json.dumps(TypeAdapter(settings).json_schema())
    return pb.MethodInfo(name=name, summary=summary, settings_schema=schema)
