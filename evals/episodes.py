"""A conversation's episodes as the service makes them: segments, embeddings, clusters, a build, a match."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from evals.harness import Session, Setup
from kvrecall.domain import episodes
from kvrecall.domain.episodes import Vectors
from kvrecall.domain.session_settings import EpisodeSettings
from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.episodes.rows import EpisodeRows
from workers.model.embedder import Embedder


@dataclass(frozen=True, eq=False)
class Built:
    """A conversation's episodes, and what they cost. Seconds of clustering (embeddings included) and of the build.

    `index_bytes` is what the lists of rows take, `copy_bytes` what copies of these rows would.
    """

    centroids: Vectors
    episodes: tuple[wire.Episode, ...]
    members: tuple[tuple[tuple[int, int], ...], ...]
    cluster_seconds: float
    build_seconds: float
    index_bytes: int
    copy_bytes: int


@dataclass(frozen=True, eq=False)
class Matched:
    """An episode that a text was matched with: its number, its rows, and the token spans of its own segments."""

    number: int
    episode: wire.Episode
    members: tuple[tuple[int, int], ...]


@cache
def _embedder() -> Embedder:
    return Embedder()


def embedded(texts: Sequence[str]) -> Vectors:
    """Unit vectors of the packaged sentence encoder, which is loaded once per process: `[n, dimensions]`."""
    return _embedder().embed(texts).result()


def built_for(setup: Setup, session: Session) -> Built | None:
    """The episodes of everything that a session has said, where the setup's arm has any."""
    if setup.arm.build == "none":
        return None
    return build(session, replace(setup.episodes, build=setup.arm.build))


def build(session: Session, settings: EpisodeSettings) -> Built:
    """The episodes of everything that a session has said. Raises `workers.errors`."""
    session.restore()
    started = time.perf_counter()
    segments = episodes.segments_of(session.utterances, settings.segment_utterances, partial=True)
    vectors = embedded([segment.text for segment in segments])
    clusters = episodes.cluster(vectors, settings.count, session.spec.seed)
    length = session.state.length
    plans = episodes.plan_episodes(
        segments,
        vectors,
        clusters,
        session.token_ids,
        medoid_utterances=settings.medoid_utterances,
        length=length,
    )
    clustered = time.perf_counter()
    request = wire.BuildEpisodesRequest(
        session=session.spec.session,
        epoch=session.spec.epoch,
        plans=[_to_wire(f"{length}.{number}", plan) for number, plan in enumerate(plans)],
        token_ids=session.token_ids[:length] if settings.build == "per_episode" else [],
    )
    found = session.scheduler.build_episodes(request).result()
    return Built(
        centroids=clusters.centroids,
        episodes=tuple(found.episodes),
        members=tuple(
            tuple((start, stop) for start, stop, near in plan.spans if near == 1) for plan in plans
        ),
        cluster_seconds=clustered - started,
        build_seconds=time.perf_counter() - clustered,
        index_bytes=sum(len(episode.rows) for episode in found.episodes),
        copy_bytes=_copy_bytes(session, found.episodes),
    )


def matched(built: Built | None, text: str) -> Matched | None:
    """The episode whose centroid is nearest to a text; None without episodes or text."""
    if built is None or not text:
        return None
    number = episodes.match(embedded([text])[0], built.centroids).episode
    return Matched(number, built.episodes[number], built.members[number])


def _to_wire(name: str, plan: episodes.EpisodePlan) -> wire.EpisodePlan:
    segments = [
        wire.Span(start=start, stop=stop, similarity=near) for start, stop, near in plan.spans
    ]
    return wire.EpisodePlan(id=name, patched_prompt=plan.patched_prompt, segments=segments)


def _copy_bytes(session: Session, built: Sequence[wire.Episode]) -> int:
    model = session.scheduler.engine.model
    rows = sum(EpisodeRows.from_bytes(episode.rows).row_count() for episode in built)
    return rows * model.shape.row_bytes(model.dtype)
