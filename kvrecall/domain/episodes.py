"""Episodes of a conversation: segments, clusters, medoids, matching, and the active one.

Pure; embeddings are passed in.

Source: EpiCache, section 3.1 and Algorithm 1, phases A1 and B. Vectors are float32 `[n,
dimensions]`, one per segment and of unit length as sentence encoders give them. Everything is a
function of its arguments and the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvrecall.domain.settings.session import EpisodeCount, EpisodeSettings
from kvrecall.domain.utterances import Utterance

Vectors = NDArray[np.float32]

AUTO_COUNTS = range(2, 17)
"""The numbers of episodes that `auto` chooses from."""
_AUTO_SEGMENTS = 8
"""Segments before `auto` has anything to choose by."""
_SILHOUETTE_SAMPLE = 2000
"""Segments that a silhouette is computed on: its time grows with their square."""
_KMEANS_RUNS = 10


@dataclass(frozen=True)
class EpisodeSegment:
    """Token positions `start` to `stop - 1` of a session, with their similarity to an episode.

    `similarity` is 1 for the episode's own segments, otherwise between 0 and 1.
    """

    start: int
    stop: int
    similarity: float


@dataclass(frozen=True)
class ActiveEpisode:
    """An episode as evictions use it. The default value stands for no episode.

    `patched_prompt` holds the token ids of the medoid segments (EpiCache section 2.3).
    """

    id: str = ""
    patched_prompt: tuple[int, ...] = ()
    segments: tuple[EpisodeSegment, ...] = ()


NO_EPISODE = ActiveEpisode()


@dataclass(frozen=True)
class Segment:
    """Consecutive utterances, embedded as one (eq. 4)."""

    utterances: tuple[Utterance, ...]

    @property
    def start(self) -> int:
        """Its first token's position."""
        return self.utterances[0].start

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.utterances[-1].stop

    @property
    def text(self) -> str:
        """The text that is embedded."""
        return "\n".join(utterance.text for utterance in self.utterances)

    @property
    def transcript(self) -> str:
        """The utterances with their sides, for people to read."""
        return "\n".join(f"{utterance.side}: {utterance.text}" for utterance in self.utterances)


@dataclass(frozen=True, eq=False)
class Clusters:
    """The episode of each segment, and the episodes' centroids: float32 `[E, dimensions]` (eq. 6).

    Episodes are numbered by their first appearance in the conversation; none is empty.
    """

    labels: tuple[int, ...]
    centroids: Vectors

    def members(self, episode: int) -> list[int]:
        """An episode's segments, in time order."""
        return [index for index, label in enumerate(self.labels) if label == episode]


@dataclass(frozen=True)
class EpisodePlan:
    """The input of an episode's build, in the log's own tokens.

    `medoid` is the segment nearest to the centroid, as a transcript. `patched_prompt` are the token
    ids of the segments nearest to it, in time order; `spans` all segments that have rows: start,
    stop, and similarity to the episode, 1 for its own and less for the others.
    """

    medoid: str
    patched_prompt: tuple[int, ...]
    spans: tuple[tuple[int, int, float], ...]
    segments: int
    tokens: int


@dataclass(frozen=True)
class Nearest:
    """The episode nearest to a query, and the cosine between the two."""

    episode: int
    similarity: float


def split_segments(
    utterances: Sequence[Utterance], width: int, *, partial: bool = False
) -> list[Segment]:
    """Segments of `width` utterances.

    With `partial`, what is left over at the end is one as well (eq. 4).
    """
    stop = len(utterances) if partial else len(utterances) // width * width
    return [
        Segment(tuple(utterances[first : min(first + width, stop)]))
        for first in range(0, stop, width)
    ]


def cluster(vectors: Vectors, count: EpisodeCount, seed: int) -> Clusters:
    """K-means over the segments (eq. 5): k-means++, the best of ten starts. At least one segment.

    `auto` takes the number of episodes, 2 to 16, whose clusters have the best mean silhouette (by
    cosine). There are never more episodes than different vectors.
    """
    distinct = len(np.unique(vectors, axis=0))
    if count != "auto":
        return _ordered(vectors, _kmeans(vectors, min(count, distinct), seed))
    found = [_kmeans(vectors, k, seed) for k in AUTO_COUNTS if k <= distinct - 1]
    if not found:
        return _ordered(vectors, _kmeans(vectors, 1, seed))
    return _ordered(vectors, max(found, key=lambda labels: _silhouette(vectors, labels, seed)))


def nearest_members(vectors: Vectors, clusters: Clusters, episode: int, count: int) -> list[int]:
    """The `count` segments of an episode nearest to its centroid by cosine, the nearest first.

    Ties: the earlier.
    """
    members = clusters.members(episode)
    cosines = cosine(clusters.centroids[episode], vectors[members])
    return [members[index] for index in np.argsort(-cosines, kind="stable")[:count]]


def plan_episodes(
    segments: Sequence[Segment],
    vectors: Vectors,
    clusters: Clusters,
    token_ids: Sequence[int],
    *,
    medoid_utterances: int,
    length: int,
) -> list[EpisodePlan]:
    """Plan the build of each episode.

    `token_ids` is the whole log, whose first `length` tokens have rows.

    A patched prompt holds as many of the segments nearest to the centroid as `medoid_utterances`
    allows.
    """
    plans = []
    for episode in range(len(clusters.centroids)):
        members = [segments[index] for index in clusters.members(episode)]
        width = max(len(segment.utterances) for segment in members)
        nearest = nearest_members(vectors, clusters, episode, -(-medoid_utterances // width))
        prompt = chain.from_iterable(
            token_ids[segments[i].start : segments[i].stop] for i in sorted(nearest)
        )
        plans.append(
            EpisodePlan(
                medoid=segments[nearest[0]].transcript,
                patched_prompt=tuple(prompt),
                spans=_spans(segments, nearness(vectors, clusters, episode), length),
                segments=len(members),
                tokens=sum(segment.stop - segment.start for segment in members),
            )
        )
    return plans


def nearness(vectors: Vectors, clusters: Clusters, episode: int) -> Vectors:
    """Similarity of each segment to an episode.

    1 for its own, the rank by cosine (0 to under 1) for others.

    Ranks, since the scale of cosines differs between encoders. Returns float32 `[segments]`.
    """
    cosines = cosine(clusters.centroids[episode], vectors)
    own = np.array([label == episode for label in clusters.labels])
    ranks = np.argsort(np.argsort(cosines, kind="stable"), kind="stable") / len(cosines)
    found: Vectors = np.where(own, 1.0, ranks).astype(np.float32)
    return found


def match(query: Vectors, centroids: Vectors) -> Nearest:
    """The centroid with the largest cosine to the query, float32 `[dimensions]` (eq.

    7); ties: the earlier.
    """
    cosines = cosine(query, centroids)
    best = int(cosines.argmax())
    return Nearest(best, float(cosines[best]))


def assign(
    vectors: Vectors, centroids: Vectors, sizes: Sequence[int]
) -> tuple[Clusters, list[int]]:
    """Put new segments, in order, to the nearest centroids, each of which moves to the mean of its larger episode.

    Returns the new segments' labels with all centroids as they are then, and the episodes' sizes in segments.
    """
    moved = centroids.astype(np.float64)
    grown = list(sizes)
    labels = []
    for vector in vectors:
        episode = match(vector, moved.astype(np.float32)).episode
        grown[episode] += 1
        moved[episode] += (vector - moved[episode]) / grown[episode]
        labels.append(episode)
    return Clusters(tuple(labels), moved.astype(np.float32)), grown


def rebuild_due(
    settings: EpisodeSettings, *, segments: int, built: int, length: int, budget: int
) -> bool:
    """Return whether episodes are due to be built from `segments` segments.

    `built` is the number of segments at the last build (0: none). The first build is due once the
    session is longer than its budget and has two segments per episode; the next whenever it has
    grown by the share `rebuild_growth`.
    """
    if built:
        return segments >= built * (1 + settings.rebuild_growth)
    least = _AUTO_SEGMENTS if settings.count == "auto" else 2 * settings.count
    return segments >= least and length > budget


def cosine(vector: Vectors, others: Vectors) -> Vectors:
    """Cosines of a vector to each of `others`: float32 `[n]`; 0 where either has no length."""
    lengths = np.linalg.norm(others, axis=1) * np.linalg.norm(vector)
    products = others @ vector
    found: Vectors = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return found


def vectors_to_bytes(vectors: Vectors) -> bytes:
    """As little-endian float32."""
    return vectors.astype("<f4").tobytes()


def vectors_from_bytes(data: bytes, dimensions: int) -> Vectors:
    """Back from `vectors_to_bytes`: `[n, dimensions]`."""
    return np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(-1, dimensions)


def _kmeans(vectors: Vectors, count: int, seed: int) -> NDArray[np.int32]:
    # Imported here: it takes most of a second, and neither a session without episodes nor the
    # command line needs it.
    from sklearn.cluster import KMeans

    kmeans = KMeans(count, init="k-means++", n_init=_KMEANS_RUNS, random_state=seed % 2**32)
    labels: NDArray[np.int32] = kmeans.fit_predict(vectors)
    return labels


def _silhouette(vectors: Vectors, labels: NDArray[np.int32], seed: int) -> float:
    from sklearn.metrics import silhouette_samples

    chosen = np.arange(len(vectors))
    if len(vectors) > _SILHOUETTE_SAMPLE:
        chosen = np.random.default_rng(seed).choice(len(vectors), _SILHOUETTE_SAMPLE, replace=False)
    if not 2 <= len(np.unique(labels[chosen])) < len(chosen):
        return -1.0
    return float(silhouette_samples(vectors[chosen], labels[chosen], metric="cosine").mean())


def _ordered(vectors: Vectors, labels: NDArray[np.int32]) -> Clusters:
    """Number the clusters by their first segments.

    K-means numbers them as its random starts fall.
    """
    order: dict[int, int] = {}
    numbered = [order.setdefault(int(label), len(order)) for label in labels]
    means = [
        vectors[[n == episode for n in numbered]].mean(0, dtype=np.float64)
        for episode in range(len(order))
    ]
    return Clusters(tuple(numbered), np.stack(means).astype(np.float32))


def _spans(
    segments: Sequence[Segment], near: Vectors, length: int
) -> tuple[tuple[int, int, float], ...]:
    """The segments' token spans with their nearness, as far as they have rows."""
    return tuple(
        (segment.start, min(segment.stop, length), float(value))
        for segment, value in zip(segments, near, strict=True)
        if segment.start < length
    )
