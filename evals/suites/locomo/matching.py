"""Share of a question's evidence in the episode matched with it: real text, the real encoder.

No language model takes part. Segments, clusters and matching are the service's
(`kvrecall/domain/episodes.py`). For comparison there are the expected share if the segments of an
episode of the matched one's size were drawn at random, and random clusters: episodes of the same
sizes with shuffled members, whose centroids are made and matched like the real ones. These are not
pure chance, since even a random cluster's centroid leans towards its own members.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path

import numpy as np

from evals.episodes import embed
from evals.suite import Record
from evals.suites.locomo.data import Conversation, Question, read_conversation
from evals.summary import Key, difference_row, group_by, mean, mean_row
from kvrecall.domain.episodes import Clusters, Segment, Vectors, cluster, match, split_segments
from kvrecall.domain.utterances import Utterance
from kvrecall_server.reporting.results import Row

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
    """All questions of one file, with segments of `width` lines, for every number of episodes."""

    path: str
    width: int
    counts: tuple[int, ...]
    seed: int

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{Path(self.path).stem}, segments of {self.width}"


@dataclass(frozen=True)
class _Evidence:
    """Share of a question's evidence in an episode, 0 to 1, whether all of it, and by chance."""

    share: float
    whole: float
    chance_share: float
    chance_whole: float


def run(unit: Matching) -> list[Record]:
    """One record per question, with lists over `counts`."""
    conversation = read_conversation(Path(unit.path))
    segments = split_segments(_to_utterances(conversation), unit.width, partial=True)
    vectors = embed([segment.text for segment in segments])
    queries = embed([question.text for question in conversation.questions])
    clusters = [cluster(vectors, count, unit.seed) for count in unit.counts]
    shuffles = [_shuffle(vectors, each, unit.seed) for each in clusters]
    records = list[Record]()
    for number, question in enumerate(conversation.questions):
        evidence = _evidence_segments(question, conversation, segments)
        query = queries[number]
        matched = [_measure(query, evidence, each) for each in clusters]
        at_random = [[_measure(query, evidence, each) for each in draws] for draws in shuffles]
        records.append(
            {
                "kind": "matching",
                "conversation": conversation.name,
                "question": number,
                "category": question.category,
                "segment_utterances": unit.width,
                "episodes": list(unit.counts),
                "share": [each.share for each in matched],
                "whole": [each.whole for each in matched],
                "chance_share": [each.chance_share for each in matched],
                "chance_whole": [each.chance_whole for each in matched],
                "random_share": [mean(each.share for each in draws) for draws in at_random],
                "random_whole": [mean(each.whole for each in draws) for draws in at_random],
            }
        )
    return records


def _to_utterances(conversation: Conversation) -> list[Utterance]:
    """Each line as an utterance; its index among the lines stands for its tokens."""
    user = conversation.speakers[0]
    return [
        Utterance(
            "user" if line.speaker == user else "assistant",
            f"{line.speaker}: {line.text}",
            index,
            index + 1,
        )
        for index, line in enumerate(conversation.lines)
    ]


def _evidence_segments(
    question: Question, conversation: Conversation, segments: Sequence[Segment]
) -> list[int]:
    """Index of the segment of each line of a question's evidence."""
    segment_by_line = {
        conversation.lines[index].id: number
        for number, segment in enumerate(segments)
        for index in range(segment.start, segment.stop)
    }
    return [segment_by_line[line] for line in sorted(question.evidence)]


def _shuffle(vectors: Vectors, clusters: Clusters, seed: int) -> list[Clusters]:
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


def _measure(query: Vectors, evidence: Sequence[int], clusters: Clusters) -> _Evidence:
    episode = match(query, clusters.centroids).episode
    size = clusters.labels.count(episode)
    segments = len(clusters.labels)
    inside = [clusters.labels[segment] == episode for segment in evidence]
    return _Evidence(
        share=mean(inside),
        whole=float(all(inside)),
        chance_share=size / segments,
        chance_whole=chance_of_all(len(set(evidence)), size, segments),
    )


def chance_of_all(wanted: int, size: int, segments: int) -> float:
    """Probability that `size` of `segments` segments, drawn at random, include `wanted` of them."""
    return comb(segments - wanted, size - wanted) / comb(segments, size) if wanted <= size else 0.0


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Share and whole of the evidence by width and number of episodes, and how far above chance."""
    rows: list[Row] = []
    for (width,), group in group_by(records, "segment_utterances").items():
        for index, count in enumerate(group[0]["episodes"]):
            columns = {"segment_utterances": width, "episodes": count}
            for condition, name in ((SHARE, "share"), (WHOLE, "whole")):
                rows += _rows_above_chance(condition, name, group, index, seed, columns)
    return rows


def _rows_above_chance(
    condition: str,
    name: str,
    records: Sequence[Record],
    index: int,
    seed: int,
    columns: dict[str, int],
) -> list[Row]:
    """One measure at one number of episodes: the matched episode, chance, and the differences."""
    ours = _values(records, name, index)
    rows = mean_row(condition, list(ours.values()), seed, method=MATCHED, **columns)
    for method, key in ((RANDOM, f"random_{name}"), (EXPECTED, f"chance_{name}")):
        theirs = _values(records, key, index)
        rows += mean_row(condition, list(theirs.values()), seed, method=method, **columns)
        above = {"method": MATCHED, "against": method, **columns}
        rows += difference_row(f"{condition}: above {method}", ours, theirs, seed, **above)
    return rows


def _values(records: Sequence[Record], name: str, index: int) -> dict[Key, float]:
    return {(each["conversation"], each["question"]): each[name][index] for each in records}
