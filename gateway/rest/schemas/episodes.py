"""Episodes: their settings in a new session, and a session's episodes with their statistics."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.rest.schemas.base import Body, View, report_one_error
from kvrecall.domain.session import Session
from kvrecall.domain.session_settings import EpisodeBuild, EpisodeSettings
from services.catalog.records import EpisodeSet

EpisodeCountBody = Annotated[
    Annotated[int, Field(ge=1, le=64)] | Literal["auto"],
    report_one_error("expected an integer from 1 to 64, or auto"),
]


class EpisodesBody(Body):
    """Episode settings: the conversation is split into segments, clustered by their embeddings."""

    count: EpisodeCountBody = Field(
        default=4,
        description="Number of episodes; auto: 2 to 16, chosen by the silhouette score.",
    )
    segment_utterances: int = Field(
        default=4, ge=1, le=64, description="Utterances in one segment, which is embedded as one."
    )
    medoid_utterances: int = Field(
        default=32,
        ge=1,
        le=256,
        description="Utterances in an episode's patched prompt: of the segments nearest to its "
        "centroid.",
    )
    build: EpisodeBuild = Field(
        default="one_pass",
        description="Score stored rows for all episodes in one pass, or prefill the log once per "
        "episode.",
    )
    rebuild_growth: float = Field(
        default=0.25,
        gt=0,
        le=100,
        description="Relative growth of the conversation that triggers a rebuild.",
    )

    def to_domain(self) -> EpisodeSettings:
        """Convert to the domain value."""
        return EpisodeSettings(**dict(self))


class EpisodeSettingsView(View):
    """Episode settings of a session."""

    count: int | Literal["auto"]
    segment_utterances: int
    medoid_utterances: int
    build: str
    rebuild_growth: float

    @classmethod
    def from_domain(cls, settings: EpisodeSettings | None) -> "EpisodeSettingsView | None":
        """Convert from the domain value; None for a session without episodes."""
        return None if settings is None else cls.model_validate(settings)


class EpisodeView(View):
    """Episode: its size, the text of its medoid segment, and the number of turns routed to it."""

    id: str
    active: bool
    segments: int
    tokens: int
    medoid: str
    matched: int


class EpisodesView(View):
    """Episodes of a session as last built, with the segments assigned to them since.

    `segments` counts the segments embedded so far, of which `built_segments` were part of the last
    of `builds` builds. `settings` is null when the session has no episodes.
    """

    session: str
    settings: EpisodeSettingsView | None
    segments: int
    built_segments: int
    builds: int
    episodes: list[EpisodeView]

    @classmethod
    def from_domain(cls, session: Session, episode_set: EpisodeSet) -> "EpisodesView":
        """Convert from a session and its episodes."""
        return cls(
            session=session.id,
            settings=EpisodeSettingsView.from_domain(session.settings.episodes),
            segments=episode_set.segments,
            built_segments=episode_set.built_segments,
            builds=episode_set.builds,
            episodes=[
                EpisodeView(
                    id=episode.id,
                    active=episode.id == episode_set.active,
                    segments=episode.segments,
                    tokens=episode.tokens,
                    medoid=episode.medoid,
                    matched=episode.matched,
                )
                for episode in episode_set.episodes
            ],
        )
