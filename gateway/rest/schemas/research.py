"""Settings of a session for research: the eviction method, repairs, sparse prefill, re-selection, episodes."""

from dataclasses import asdict, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from gateway.rest.schemas.base import Body, JsonObject, Name
from gateway.rest.schemas.episodes import EpisodesBody
from gateway.rest.schemas.public import copy_optional, copy_to
from kvrecall import client
from kvrecall.domain.settings.prefill import Prefill, PrefillSettings
from kvrecall.domain.settings.repair import RepairRule, RepairSettings
from kvrecall.domain.settings.reselection import Reselection
from kvrecall.domain.settings.retrieval import Retrieval, RetrievalSettings
from kvrecall.domain.settings.session import (
    EpisodeSettings,
    LayerBudgets,
    RepairTrigger,
    SessionSettings,
)

_T = TypeVar("_T", RepairRule, Prefill, Retrieval)


class ReselectionBody(Body):
    """Selection of the active rows by an answer's own tokens, among all rows, as it is generated."""

    every: int = Field(
        default=Reselection.every,
        ge=1,
        le=256,
        description="Tokens of the answer between two selections.",
    )

    def to_domain(self) -> Reselection:
        """Convert to the domain value."""
        return Reselection(self.every)


def _none_for_empty(value: Any) -> Any:
    """Return None for an empty object, which leaves all to the method as null does."""
    return None if value == {} else value


class ResearchBody(Body):
    """How the active rows are chosen, for evaluations and papers. It may change in any release."""

    method: Name | None = Field(
        default=None,
        description="Eviction method, one of GET /v1/methods; null: the one that `recall` stands for.",
    )
    method_settings: JsonObject = Field(
        default={},
        max_length=64,
        description="Settings of the method; their schema is in GET /v1/methods.",
    )
    layer_budgets: LayerBudgets | None = Field(
        default=None,
        description="Split of the budget over the layers; null: the method's own split.",
    )
    repair_rows: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="Rows of the budget reserved for repair; 0: no repair.",
    )
    repair_on: (
        list[Literal["tool_call", "tool_delta", "tool_result", "last_output", "turn"]] | None
    ) = Field(
        default=None,
        max_length=5,
        description="Signals that trigger a repair. All but turn run between turns. null: all but "
        "last_output, and without turn where answers retrieve.",
    )
    repair_settings: Annotated[RepairSettings | None, BeforeValidator(_none_for_empty)] = Field(
        default=None, description="Settings of the repair. null or empty: the defaults."
    )
    repair_seconds: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="Time limit of one repair, in seconds; null: no limit.",
    )
    prefill: Annotated[PrefillSettings | None, BeforeValidator(_none_for_empty)] = Field(
        default=None,
        description="Settings of the prefill: what prompts attend to. null or empty: as the method does.",
    )
    retrieve: Annotated[RetrievalSettings | None, BeforeValidator(_none_for_empty)] = Field(
        default=None,
        description="Settings of retrieval while answers are generated. null or empty: as the method does.",
    )
    reselect: ReselectionBody | None = Field(
        default=None,
        description="Select the active rows anew while an answer is generated; null: as the method "
        "does.",
    )
    episodes: EpisodesBody | None = Field(
        default=None,
        description="Episode settings; null: no episodes. Omitted: the default settings with a "
        "method that supports episodes.",
    )

    def to_members(self) -> dict[str, Any]:
        """Convert to the members of the domain's CreateSession, all but `method`."""
        triggers = None if self.repair_on is None else frozenset(map(RepairTrigger, self.repair_on))
        return {
            "method_settings": self.method_settings,
            "layer_budgets": self.layer_budgets,
            "repair_rows": self.repair_rows,
            "repair_on": triggers,
            "repair_settings": _to_domain(RepairRule, self.repair_settings),
            "repair_seconds": self.repair_seconds,
            "prefill": _to_domain(Prefill, self.prefill),
            "retrieve": _to_domain(Retrieval, self.retrieve),
            "reselect": None if self.reselect is None else self.reselect.to_domain(),
            "episodes": self._episodes_to_domain(),
        }

    def _episodes_to_domain(self) -> EpisodeSettings | Literal["default"] | None:
        if "episodes" not in self.model_fields_set:
            return "default"
        return None if self.episodes is None else self.episodes.to_domain()


def to_research(settings: SessionSettings) -> client.Research:
    """Convert the settings that a session has."""
    return copy_to(
        client.Research,
        settings,
        method_settings=dict(settings.method_settings),
        repair_on=tuple(sorted(trigger.value for trigger in settings.repair_on)),
        repair_settings=_show(RepairSettings, settings.repair_settings),
        prefill=_show(PrefillSettings, settings.prefill),
        retrieve=_show(RetrievalSettings, settings.retrieve),
        reselect=copy_optional(client.Reselection, settings.reselect),
        episodes=copy_optional(client.EpisodeSettings, settings.episodes),
    )


def _to_domain(
    kind: type[_T], given: RepairSettings | PrefillSettings | RetrievalSettings | None
) -> _T | None:
    """Complete what a session was given by the constants of its domain value."""
    return None if given is None else kind(**asdict(given))


def _show(
    kind: type[RepairSettings | PrefillSettings | RetrievalSettings],
    settings: RepairSettings | PrefillSettings | RetrievalSettings | None,
) -> JsonObject:
    """Return what a session may be given of its settings."""
    if settings is None:
        return {}
    return {each.name: getattr(settings, each.name) for each in fields(kind)}
