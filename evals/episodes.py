"""Episodes of a conversation as the service makes them: segment, embed, cluster, build, match."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from evals.harness import Session, Setup
from kvrecall.domain import episodes
from kvrecall.domain.episodes import Vectors
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.episodes.rows import EpisodeRows
from workers.model.embedder import Embedder


@dataclass(frozen=True, eq=False)
class BuiltEpisodes:
    """Episodes of a conversation and their cost.

    `members` are the token spans `(start, stop)` of each episode's own segments. Seconds are those
    of clustering (embeddings included) and of the build. `index_bytes` is the size of the lists of
    rows, `copy_bytes` that of copies of these rows.
    """

    centroids: Vectors
    episodes: tuple[pb.Episode, ...]
    members: tuple[tuple[tuple[int, int], ...], ...]
    cluster_seconds: float
    build_seconds: float
    index_bytes: int
    copy_bytes: int


@dataclass(frozen=True, eq=False)
class MatchedEpisode:
    """The episode matched with a text: its number, its rows, and its own segments' token spans."""

    number: int
    episode: pb.Episode
    members: tuple[tuple[int, int], ...]


@cache
def _embedder() -> Embedder:
    return Embedder()


def embed(texts: Sequence[str]) -> Vectors:
    """Unit vectors `[n, dimensions]` of the packaged sentence encoder, loaded once per process."""
    return _embedder().embed(texts).result()


def build_for(setup: Setup, session: Session) -> BuiltEpisodes | None:
    """Build the episodes of the whole session; None if the setup's configuration has none."""
    if setup.config.build == "none":
        return None
    return build(session, settings_for(setup))


def settings_for(setup: Setup) -> EpisodeSettings:
    """Settings of the episodes of a setup whose configuration has any."""
    config = setup.config
    assert config.build != "none", "the configuration has episodes"
    medoids = config.medoids or setup.episodes.medoid_utterances
    return replace(setup.episodes, build=config.build, medoid_utterances=medoids)


def build(session: Session, settings: EpisodeSettings) -> BuiltEpisodes:
    """Build the episodes of the whole session. Raises `workers.errors`."""
    session.restore()
    started = time.perf_counter()
    segments = episodes.split_segments(
        session.utterances, settings.segment_utterances, partial=True
    )
    vectors = embed([segment.text for segment in segments])
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
    request = pb.BuildEpisodesRequest(
        session=session.spec.session,
        epoch=session.spec.epoch,
        plans=[_plan_to_wire(f"{length}.{number}", plan) for number, plan in enumerate(plans)],
        token_ids=session.token_ids[:length] if settings.build == "per_episode" else [],
    )
    answer = session.scheduler.build_episodes(request).result()
    return BuiltEpisodes(
        centroids=clusters.centroids,
        episodes=tuple(answer.episodes),
        members=tuple(
            tuple((start, stop) for start, stop, near in plan.spans if near == 1) for plan in plans
        ),
        cluster_seconds=clustered - started,
        build_seconds=time.perf_counter() - clustered,
        index_bytes=sum(len(episode.rows) for episode in answer.episodes),
        copy_bytes=_copy_bytes(session, answer.episodes),
    )


def match_text(built: BuiltEpisodes | None, text: str) -> MatchedEpisode | None:
    """The episode whose centroid is nearest to `text`; None without episodes or text."""
    if built is None or not text:
        return None
    number = episodes.match(embed([text])[0], built.centroids).episode
    return MatchedEpisode(number, built.episodes[number], built.members[number])


def _plan_to_wire(name: str, plan: episodes.EpisodePlan) -> pb.EpisodePlan:
    segments = [
        pb.Span(start=start, stop=stop, similarity=near) for start, stop, near in plan.spans
    ]
    return pb.EpisodePlan(id=name, patched_prompt=plan.patched_prompt, segments=segments)


def _copy_bytes(session: Session, built: Sequence[pb.Episode]) -> int:
    model = session.scheduler.engine.model
    rows = sum(EpisodeRows.from_bytes(episode.rows).row_count() for episode in built)
    return rows * model.shape.row_bytes(model.dtype)
