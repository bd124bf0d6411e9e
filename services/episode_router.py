"""Routing of a turn to its episode: its text against the centroids (EpiCache section 3.1, eq.

7).
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.domain.episodes import Vectors, match, vectors_from_bytes
from kvrecall.domain.errors import EmbeddingRefused, UnknownEpisode, WorkerLost, WorkerRefused
from kvrecall.domain.events import EpisodesFailed
from kvrecall.domain.messages import Message
from kvrecall.domain.session import Session
from kvrecall.domain.utterances import query_text
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import span
from services.catalog.records import EpisodeSet
from services.context import ServiceContext


@dataclass(frozen=True)
class Match:
    """The episode that a turn matches, and the cosine of the match.

    `load` is the episode when it is not the active one. `seconds` is the time that matching took.
    """

    episode: str
    similarity: float
    load: pb.Episode | None
    seconds: float


class EpisodeRouter:
    """Matches turns with their sessions' episodes. No turn fails because matching fails."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._events = context.events
        self._seconds = context.limits.match_seconds

    async def match(self, session: Session, messages: Sequence[Message]) -> Match | None:
        """Match the turn's text, up to the user's last message, with an episode.

        None without episodes or text, and when the text cannot be embedded in time (published as an
        event). Raises CatalogError.
        """
        started = time.monotonic()
        text = "" if session.settings.episodes is None else query_text(messages)
        if not text:
            return None
        found = await self._catalog.episodes.get(session.id)
        if not found.episodes:
            return None
        try:
            with span("match episode"):
                nearest = match(await self._embed(text, found), _centroids(found))
            chosen = found.episodes[nearest.episode]
            load = None
            if chosen.id != found.active:
                load = pb.Episode.FromString(
                    await self._catalog.episodes.get_built(session.id, chosen.id)
                )
        except (WorkerRefused, WorkerLost, EmbeddingRefused, UnknownEpisode) as error:
            self._events.publish(EpisodesFailed(session.id, "match", error.code, error.message))
            return None
        return Match(chosen.id, nearest.similarity, load, time.monotonic() - started)

    async def _embed(self, text: str, found: EpisodeSet) -> Vectors:
        try:
            async with asyncio.timeout(self._seconds):
                result = await self._worker.embed([text])
        except TimeoutError as error:
            raise EmbeddingRefused(
                f"the encoder took more than {self._seconds:g} seconds"
            ) from error
        if result.dimensions != found.dimensions or len(result.vectors) != 4 * found.dimensions:
            raise EmbeddingRefused(
                f"the encoder gives {result.dimensions} dimensions, the session's episodes have {found.dimensions}"
            )
        vector: Vectors = vectors_from_bytes(result.vectors, result.dimensions)[0]
        return vector


def _centroids(found: EpisodeSet) -> Vectors:
    return vectors_from_bytes(b"".join(each.centroid for each in found.episodes), found.dimensions)
