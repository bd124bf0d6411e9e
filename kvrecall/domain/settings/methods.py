"""The settings of the eviction methods, by name. The methods themselves are in `workers/methods/`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from kvrecall.domain.errors import BadSettings
from kvrecall.domain.settings.invalid import find_invalid
from kvrecall.domain.settings.reselection import Reselection

# The method of a session with recall, which is the default, and of one without.
RECALL = "icecache"
FULL_CACHE = "full"

# Reduction of several attention weights to one score.
Reduction = Literal["max", "mean"]


@dataclass(frozen=True)
class MethodSettings:
    """The settings of a method; none, unless its own class has some."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class StreamingLLMSettings(MethodSettings):
    """Settings of `streaming_llm`."""

    sinks: Annotated[
        int, Field(ge=0, le=4096, description="First tokens that are always kept.")
    ] = 4


@dataclass(frozen=True)
class H2OSettings(MethodSettings):
    """Settings of `h2o`."""

    recent: Annotated[
        float, Field(ge=0, le=1, description="Share of the budget for the most recent rows.")
    ] = 0.5
    per_query: Annotated[
        bool, Field(description="Divide the sum by the number of queries that could see the row.")
    ] = False


@dataclass(frozen=True)
class SnapKVSettings(MethodSettings):
    """Settings of `snapkv`."""

    window: Annotated[
        int, Field(ge=1, le=256, description="Number of last tokens whose queries are observed.")
    ] = 32
    pool: Annotated[
        int, Field(ge=1, le=63, description="Width of the pooling, in tokens; 1 is none.")
    ] = 7
    pooling: Annotated[Reduction, Field(description="Kind of pooling along the sequence.")] = "max"
    group: Annotated[
        Reduction, Field(description="Reduction over the query heads of a KV head.")
    ] = "mean"


@dataclass(frozen=True)
class AdaKVSettings(SnapKVSettings):
    """Settings of `adakv`."""

    floor: Annotated[
        float, Field(ge=0, le=1, description="Share of the budget that every head gets first.")
    ] = 0.2


@dataclass(frozen=True)
class KeyDiffSettings(MethodSettings):
    """Settings of `keydiff`."""

    pool_heads: Annotated[
        bool, Field(description="Share a layer's budget between its heads by score.")
    ] = False
    whole_tokens: Annotated[
        bool,
        Field(
            description="Rank a token by the mean of its ranks over layers and heads, "
            "so that it is kept or evicted whole."
        ),
    ] = False


@dataclass(frozen=True)
class InfiniPotSettings(MethodSettings):
    """Settings of `infinipot`."""

    prompt: Annotated[
        str, Field(min_length=1, max_length=2000, description="Prompt run after each block.")
    ] = "Summarize the previous context highlighting the most important parts."
    tokens: Annotated[
        Reduction, Field(description="Reduction of attention over the prompt's tokens.")
    ] = "max"
    pool_heads: Annotated[
        bool,
        Field(description="Share a layer's budget between its heads by score (EpiCache A.2)."),
    ] = False


@dataclass(frozen=True)
class KVzipSettings(MethodSettings):
    """Settings of `kvzip`."""

    prompt: Annotated[
        str,
        Field(min_length=1, max_length=2000, description="Request in front of the repeated block."),
    ] = "Repeat the previous context exactly."
    pool_heads: Annotated[
        bool, Field(description="Share a layer's budget between its heads by score.")
    ] = True


@dataclass(frozen=True)
class ChunkKVSettings(MethodSettings):
    """Settings of `chunkkv`."""

    window: Annotated[
        int, Field(ge=1, le=256, description="Number of last tokens whose queries are observed.")
    ] = 32
    chunk: Annotated[int, Field(ge=1, le=256, description="Tokens per chunk.")] = 10
    reuse: Annotated[
        int, Field(ge=1, le=64, description="Consecutive layers that share one selection.")
    ] = 2
    aggregate: Annotated[
        Literal["sum", "mean"], Field(description="Reduction of the scores within a chunk.")
    ] = "sum"


@dataclass(frozen=True)
class ScissorhandsSettings(MethodSettings):
    """Settings of `scissorhands`."""

    recent: Annotated[
        int, Field(ge=0, le=4096, description="Most recent rows that are always kept.")
    ] = 10


@dataclass(frozen=True)
class EpiCacheSettings(MethodSettings):
    """Settings of `epicache`."""

    rank: Annotated[
        Literal["attention", "key_difference"],
        Field(description="Score of a row: attention (the paper's), or KeyDiff's score."),
    ] = "key_difference"
    whole_tokens: Annotated[
        bool, Field(description="Rank a token by the mean of its ranks over layers and heads.")
    ] = True
    topic: Annotated[
        float,
        Field(ge=0, le=100, description="Weight of a segment's similarity to the active episode."),
    ] = 1.0
    window: Annotated[
        int,
        Field(
            ge=1,
            le=256,
            description="Number of last tokens that are observed while there is no episode.",
        ),
    ] = 64
    prompt: Annotated[
        str,
        Field(max_length=2000, description="Instruction in front of the medoid segments."),
    ] = "Extract the essential information of this conversation."
    reduce: Annotated[
        Reduction, Field(description="Reduction of attention over tokens and over a head's group.")
    ] = "max"
    pool_heads: Annotated[
        bool, Field(description="Share a layer's budget between its heads by score.")
    ] = True
    pool: Annotated[
        int, Field(ge=1, le=63, description="Width of the pooling of attention; 1 is none.")
    ] = 7


@dataclass(frozen=True)
class LoopServeSettings(SnapKVSettings):
    """Settings of `loopserve`."""

    every: Annotated[
        int,
        Field(
            ge=1, le=256, description="Tokens of an answer between two selections among all rows."
        ),
    ] = Reselection.every


@dataclass(frozen=True)
class IceCacheSettings(StreamingLLMSettings):
    """Settings of `icecache`."""

    share: Annotated[
        float, Field(gt=0, le=0.9, description="Share of the budget for retrieved rows.")
    ] = 0.75
    choice: Annotated[
        Literal["sample", "best"],
        Field(
            description="How rows are retrieved: drawn by their weight, or those of most weight."
        ),
    ] = "sample"


METHOD_SETTINGS: Mapping[str, type[MethodSettings]] = MappingProxyType(
    {
        "full": MethodSettings,
        "streaming_llm": StreamingLLMSettings,
        "h2o": H2OSettings,
        "snapkv": SnapKVSettings,
        "pyramidkv": SnapKVSettings,
        "adakv": AdaKVSettings,
        "keydiff": KeyDiffSettings,
        "infinipot": InfiniPotSettings,
        "kvzip": KVzipSettings,
        "chunkkv": ChunkKVSettings,
        "scissorhands": ScissorhandsSettings,
        "epicache": EpiCacheSettings,
        "loopserve": LoopServeSettings,
        "icecache": IceCacheSettings,
        "tova": MethodSettings,
        "knorm": MethodSettings,
        "random": MethodSettings,
        "oldest": MethodSettings,
    }
)


def check_method_settings(method: str, given: Mapping[str, Any]) -> None:
    """Check a session's settings of its method. Raises BadSettings, which names the setting.

    A method that this version does not know is left to the worker that offers it.
    """
    if method not in METHOD_SETTINGS:
        return
    try:
        _adapt(method).validate_python(dict(given))
    except ValidationError as error:
        path, expected = find_invalid(error)
        path = f"research.method_settings.{path}"
        raise BadSettings(path, f"{path} of {method}: {expected}") from None


@cache
def _adapt(method: str) -> TypeAdapter[MethodSettings]:
    """Build the validator of a method's settings, once in a process."""
    return TypeAdapter(METHOD_SETTINGS[method])
