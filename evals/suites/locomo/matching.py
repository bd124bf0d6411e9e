"""How often the episode that a question is matched with holds the question's evidence: real text, the real encoder.

No language model takes part. Segments, clusters and matching are the service's (`kvrecall/domain/episodes.py`). Beside
them stand what an episode of the matched one's size would hold if its segments were drawn at random, and random
clusters: episodes of the same sizes with shuffled members, whose centroids are made and matched like the
real ones. These are not pure chance, since even a random cluster's centroid leans towards its own members.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path

import numpy as np

from evals.episodes import embedded
from evals.suite import Record
from evals.suites.locomo.data import Asked, Conversation, read
from evals.summary import Key, difference_row, grouped, mean, mean_row
from kvrecall.domain.episodes import Clusters, Segment, Vectors, cluster, match, segments_of
from kvrecall.domain.utterances import Utterance
from kvrecall.reporting.results import Row

COUNTS = tuple(range(2, 17))
WIDTHS = (2, 4, 8)
MATCHED = "k-means"
RANDOM = "random clusters"
EXPECTED = "expected at random"
SHARE = "share of the evidence in the matched episode"
WHOLE = "all of the evidence in the matched episode"
_SHUFFLES = 20


@dataclass(frozen=True)
class Matching:
    """All questions of one file, with segments of `width` lines, for every number of episodes in `counts`."""

    path: str
    width: int
    counts: tuple[int, ...]
    seed: int

    @property
    def label(self) -> str:
        """For the progress bar."""
        return f"{Path(self.path).stem}, segments of {self.width}"


@dataclass(frozen=True)
class _Held:
    """How much of a question's evidence an episode holds, 0 to 1, whether it is all, and what chance would give."""

    share: float
    whole: float
    chance_share: float
    chance_whole: float


def run(unit: Matching) -> list[Record]:
    """A record per question: lists over `counts`."""
    told = read(Path(unit.path))
    segments = segments_of(_utterances(told), unit.width, partial=True)
    vectors = embedded([segment.text for segment in segments])
    queries = embedded([question.text for question in told.questions])
    places = [_places(question, told, segments) for question in told.questions]
    clusters = [cluster(vectors, count, unit.seed) for count in unit.counts]
    shuffles = [_shuffled(vectors, found, unit.seed) for found in clusters]
    records = list[Record]()
    for number, (query, evidence) in enumerate(zip(queries, places, strict=True)):
        held = [_held(query, evidence, found) for found in clusters]
        at_random = [[_held(query, evidence, found) for found in each] for each in shuffles]
        records.append(
            {
                "kind": "matching",
                "conversation": told.name,
                "question": number,
                "category": told.questions[number].category,
                "segment_utterances": unit.width,
                "episodes": list(unit.counts),
                "share": [each.share for each in held],
                "whole": [each.whole for each in held],
                "chance_share": [each.chance_share for each in held],
                "chance_whole": [each.chance_whole for each in held],
                "random_share": [mean(each.share for each in draws) for draws in at_random],
                "random_whole": [mean(each.whole for each in draws) for draws in at_random],
            }
        )
    return records


def _utterances(told: Conversation) -> list[Utterance]:
    """Each line as an utterance; its place among the lines stands for its tokens."""
    user = told.speakers[0]
    return [
        Utterance(
            "user" if line.speaker == user else "assistant",
            f"{line.speaker}: {line.text}",
            at,
            at + 1,
        )
        for at, line in enumerate(told.lines)
    ]


def _places(question: Asked, told: Conversation, segments: Sequence[Segment]) -> list[int]:
    """The segment of each line of a question's evidence."""
    of_line = {
        told.lines[at].id: n
        for n, segment in enumerate(segments)
        for at in range(segment.start, segment.stop)
    }
    return [of_line[line] for line in sorted(question.evidence)]


def _shuffled(vectors: Vectors, clusters: Clusters, seed: int) -> list[Clusters]:
    """Episodes of the same sizes, their members drawn at random."""
    rng = np.random.default_rng(seed)
    draws = [rng.permutation(np.asarray(clusters.labels)) for _ in range(_SHUFFLES)]
    count = len(clusters.centroids)
    return [
        Clusters(
            tuple(labels.tolist()),
            np.stack([vectors[labels == episode].mean(0) for episode in range(count)]),
        )
        for labels in draws
    ]


def _held(query: Vectors, evidence: Sequence[int], clusters: Clusters) -> _Held:
    episode = match(query, clusters.centroids).episode
    size = clusters.labels.count(episode)
    segments = len(clusters.labels)
    inside = [clusters.labels[segment] == episode for segment in evidence]
    return _Held(
        share=mean(inside),
        whole=float(all(inside)),
        chance_share=size / segments,
        chance_whole=chance_of_all(len(set(evidence)), size, segments),
    )


def chance_of_all(wanted: int, size: int, segments: int) -> float:
    """How likely `size` of `segments` segments, drawn at random, have `wanted` given ones among them."""
    return comb(segments - wanted, size - wanted) / comb(segments, size) if wanted <= size else 0.0


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """By width and number of episodes: the share and the whole of the evidence, and how far above chance they are."""
    rows: list[Row] = []
    for (width,), found in grouped(records, "segment_utterances").items():
        for place, count in enumerate(found[0]["episodes"]):
            told = {"segment_utterances": width, "episodes": count}
            for condition, name in ((SHARE, "share"), (WHOLE, "whole")):
                ours = _values(found, name, place)
                rows += mean_row(condition, list(ours.values()), seed, method=MATCHED, **told)
                for method, other in ((RANDOM, f"random_{name}"), (EXPECTED, f"chance_{name}")):
                    theirs = _values(found, other, place)
                    rows += mean_row(condition, list(theirs.values()), seed, method=method, **told)
                    above = {"method": MATCHED, "against": method, **told}
                    rows += difference_row(
                        f"{condition}: above {method}", ours, theirs, seed, **above
                    )
    return rows


def _values(records: Sequence[Record], name: str, place: int) -> dict[Key, float]:
    return {(each["conversation"], each["question"]): each[name][place] for each in records}
