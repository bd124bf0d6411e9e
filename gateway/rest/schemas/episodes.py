"""Episodes: their settings in a new session, and a session's episodes with their statistics."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.rest.schemas.base import Body, report_one_error
from gateway.rest.schemas.public import copy_optional, copy_to
from kvrecall import client
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import EpisodeBuild, EpisodeSettings
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
    build: EpisodeBuild = Field(
        default="one_pass",
        description="Score stored rows for all episodes in one pass, or prefill the log once per "
        "episode.",
    )

    def to_domain(self) -> EpisodeSettings:
        """Convert to the domain value."""
        return EpisodeSettings(self.count, build=self.build)


def to_episodes(session: Session, episode_set: EpisodeSet) -> client.Episodes:
    """Convert a session's episodes."""
    return copy_to(
        client.Episodes,
        episode_set,
        session=session.id,
        settings=copy_optional(client.EpisodeSettings, session.settings.episodes),
        episodes=tuple(
            copy_to(client.Episode, episode, active=episode.id == episode_set.active)
            for episode in episode_set.episodes
        ),
    )
