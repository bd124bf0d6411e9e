"""Episodes of sessions: which one a turn belongs to, and their maintenance between turns.

A turn goes to the episode whose centroid its text is nearest to (EpiCache section 3.1, eq. 7).
Maintenance embeds new segments, assigns them, and rebuilds the episodes when due. Every step of it
ends in a commit: an interruption, by a turn or a crash, loses no more than the current step.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvrecall.domain.episodes import (
    Clusters,
    EpisodePlan,
    Segment,
    Vectors,
    assign,
    cluster,
    match,
    plan_episodes,
    rebuild_due,
    split_segments,
    vectors_from_bytes,
    vectors_to_bytes,
)
from kvrecall.domain.errors import (
    EmbeddingRefused,
    ServiceError,
    SessionBusy,
    StaleEpoch,
    UnknownEpisode,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.events import EpisodesBuilt, EpisodesFailed
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall.domain.utterances import query_text, utterances
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import current_span, span, under
from services.catalog.records import (
    BuildCommit,
    EpisodeRecord,
    EpisodeSet,
    SegmentRecord,
    SegmentsCommit,
)
from services.context import ServiceContext
from services.embedding import embed_query, embed_texts
from services.sessions.active import ActiveSession

# Segments per call of the encoder and per commit: a turn whose query is to be embedded waits for no
# more.
_SEGMENTS_PER_STEP = 32
_TURNS_PER_READ = 128


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
        vector = await embed_query(self._worker, text, self._seconds)
        if len(vector) != found.dimensions:
            raise EmbeddingRefused(
                f"the encoder gives {len(vector)} dimensions, the session's episodes have {found.dimensions}"
            )
        return vector


def _centroids(found: EpisodeSet) -> Vectors:
    return vectors_from_bytes(b"".join(each.centroid for each in found.episodes), found.dimensions)


class EpisodeMaintainer:
    """Maintains the episodes of sessions that have them.

    At most one `run` per session at a time.
    """

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._sessions = context.sessions
        self._events = context.events
        self._clustering = context.clustering

    async def run(self, live: ActiveSession) -> None:
        """Bring the session's episodes up to its log. Publishes failures, and raises nothing.

        May be cancelled at any time; the next call continues from the last commit.
        """
        step: Literal["segment", "build"] = "segment"
        try:
            session = await self._catalog.sessions.get(live.id)
            settings = session.settings.episodes
            assert settings is not None, "only sessions with episodes are maintained"
            await self._sessions.epoch(live)  # no other process changes what is read from here on
            found = await self._segment(live, settings)
            step = "build"
            length = session.memory.length
            budget = session.settings.budget or session.memory.budget
            if rebuild_due(
                settings,
                segments=found.segments,
                built=found.built_segments,
                length=length,
                budget=budget,
            ):
                with under(current_span().follow("build episodes")):
                    await self._build(live, session, settings, found)
        except (StaleEpoch, SessionBusy):
            return  # another process went on with the session
        except ServiceError as error:
            self._events.publish(EpisodesFailed(live.id, step, error.code, error.message))

    async def _segment(self, live: ActiveSession, settings: EpisodeSettings) -> EpisodeSet:
        """Embed and assign every complete segment; return the episode set with them."""
        found = await self._catalog.episodes.get(live.id)
        while new := await self._next_segments(live.id, settings.segment_utterances, found):
            vectors = await embed_texts(self._worker, [segment.text for segment in new])
            if found.dimensions not in (0, vectors.shape[1]):
                # Another encoder: its vectors cannot be compared with those that are stored.
                await self._catalog.episodes.clear(live.id, await self._sessions.epoch(live))
                found = await self._catalog.episodes.get(live.id)
                continue
            commit = _extend(found, new, vectors)
            await self._catalog.episodes.commit_segments(
                live.id, commit, await self._sessions.epoch(live)
            )
            found = commit.episode_set
        return found

    async def _next_segments(self, session: str, width: int, found: EpisodeSet) -> list[Segment]:
        # A turn has an utterance at least, so these have a segment at least, unless the log ends.
        turns = await self._catalog.turns.get_after(
            session, found.last_turn - 1, _TURNS_PER_READ + width
        )
        done = found.last_utterance + 1
        before = utterances(turns)[:done]
        start = found.next_token - (before[-1].stop if before else 0)
        return split_segments(utterances(turns, start)[done:], width)[:_SEGMENTS_PER_STEP]

    async def _build(
        self, live: ActiveSession, session: Session, settings: EpisodeSettings, found: EpisodeSet
    ) -> None:
        segments = await self._catalog.episodes.get_segments(live.id)
        vectors = vectors_from_bytes(
            b"".join(segment.vector for segment in segments), found.dimensions
        )
        log = await self._log(live.id)
        # Clustering a long conversation takes seconds, and other sessions continue meanwhile.
        plan = partial(_plan_build, session, settings, log, vectors)
        planning = self._clustering.submit(session.settings.tenant, plan)
        clusters, plans = await asyncio.wrap_future(planning)
        request = _request(session, plans, found.builds + 1)
        if settings.build == "per_episode":
            request.token_ids.extend(_token_ids(log)[: session.memory.rows])
        request.epoch = await self._sessions.ensure_open(live)
        result = await self._call_worker(live, request)
        commit = _build_commit(found, clusters, plans, result)
        await self._catalog.episodes.commit_build(live.id, commit, request.epoch)
        self._events.publish(
            EpisodesBuilt(live.id, len(plans), len(segments), result.scored_rows, result.seconds)
        )

    async def _log(self, session: str) -> list[Turn]:
        log: list[Turn] = []
        while turns := await self._catalog.turns.get_after(session, len(log), _TURNS_PER_READ):
            log += turns
        return log

    async def _call_worker(
        self, live: ActiveSession, request: pb.BuildEpisodesRequest
    ) -> pb.BuildEpisodesResult:
        def ask_under(epoch: int) -> Awaitable[pb.BuildEpisodesResult]:
            request.epoch = epoch
            return self._worker.build_episodes(request)

        try:
            result = await self._sessions.call_reopening(live, request.epoch, ask_under)
        except WorkerLost:
            live.needs_reopen = True
            raise
        if [episode.id for episode in result.episodes] != [plan.id for plan in request.plans]:
            raise WorkerLost("the worker built other episodes than it was asked for")
        return result


def _extend(found: EpisodeSet, new: Sequence[Segment], vectors: Vectors) -> SegmentsCommit:
    """Extend the set by new segments: each goes to the nearest episode, which grows by it."""
    labels = [-1] * len(new)
    episodes = list(found.episodes)
    if episodes:
        centroids = vectors_from_bytes(
            b"".join(each.centroid for each in episodes), found.dimensions
        )
        clusters, sizes = assign(vectors, centroids, [each.segments for each in episodes])
        labels = list(clusters.labels)
        episodes = [
            replace(
                each,
                centroid=vectors_to_bytes(clusters.centroids[number]),
                segments=sizes[number],
                tokens=each.tokens
                + sum(new[i].stop - new[i].start for i in clusters.members(number)),
            )
            for number, each in enumerate(episodes)
        ]
    records = [
        SegmentRecord(
            found.segments + i, segment.start, segment.stop, vectors_to_bytes(vectors[i]), labels[i]
        )
        for i, segment in enumerate(new)
    ]
    last = new[-1].utterances[-1]
    changed = replace(
        found,
        segments=found.segments + len(new),
        next_token=last.stop,
        last_turn=last.turn,
        last_utterance=last.index,
        dimensions=vectors.shape[1],
        episodes=tuple(episodes),
    )
    return SegmentsCommit(tuple(records), changed)


def _plan_build(
    session: Session, settings: EpisodeSettings, log: Sequence[Turn], vectors: Vectors
) -> tuple[Clusters, list[EpisodePlan]]:
    """Cluster the log's segments, one per vector, and plan an episode for each cluster."""
    clusters = cluster(vectors, settings.count, session.settings.seed)
    plans = plan_episodes(
        split_segments(utterances(log), settings.segment_utterances)[: len(vectors)],
        vectors,
        clusters,
        _token_ids(log),
        medoid_utterances=settings.medoid_utterances,
        length=session.memory.rows,
    )
    return clusters, plans


def _token_ids(log: Sequence[Turn]) -> list[int]:
    return [token for turn in log for token in turn.token_ids]


def _request(session: Session, plans: Sequence[EpisodePlan], build: int) -> pb.BuildEpisodesRequest:
    return pb.BuildEpisodesRequest(
        session=session.id,
        plans=[
            pb.EpisodePlan(
                id=f"{build}-{number}",
                patched_prompt=plan.patched_prompt,
                segments=[
                    pb.Span(start=start, stop=stop, similarity=near)
                    for start, stop, near in plan.spans
                ],
            )
            for number, plan in enumerate(plans, 1)
        ],
    )


def _build_commit(
    found: EpisodeSet,
    clusters: Clusters,
    plans: Sequence[EpisodePlan],
    result: pb.BuildEpisodesResult,
) -> BuildCommit:
    """Build the commit of new episodes, none of which was matched yet."""
    episodes = tuple(
        EpisodeRecord(
            id=built.id,
            centroid=vectors_to_bytes(centroid),
            segments=plan.segments,
            tokens=plan.tokens,
            medoid=plan.medoid,
        )
        for built, plan, centroid in zip(result.episodes, plans, clusters.centroids, strict=True)
    )
    changed = replace(
        found, built_segments=found.segments, builds=found.builds + 1, episodes=episodes
    )
    return BuildCommit(
        changed,
        tuple(built.SerializeToString(deterministic=True) for built in result.episodes),
        clusters.labels,
    )
