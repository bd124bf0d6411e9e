"""Combines a method's scores with the episode's similarity, for evictions and episode builds."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrecall.domain.episodes import EpisodeSegment
from workers.cache.active_cache import EMPTY
from workers.methods import LayerRows, Method
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.primitives.scoring import row_ranks
from workers.primitives.tokens import TokenIndex


def rank_rows(
    method: Method,
    layers: Sequence[LayerRows],
    segments: Sequence[EpisodeSegment],
    group: Group = Alone(),
) -> list[Tensor]:
    """Rank each layer's rows; higher is kept longer: float32 `[n_kv_heads, n]` per layer.

    segments: those of the active episode, with their similarity to it; empty without an episode.
    """
    return combine_scores(
        method,
        [method.scores(rows) for rows in layers],
        [rows.positions for rows in layers],
        segments,
        group,
    )


def combine_scores(
    method: Method,
    scores: Sequence[Tensor],
    positions: Sequence[Tensor],
    segments: Sequence[EpisodeSegment],
    group: Group = Alone(),
) -> list[Tensor]:
    """Combine a method's own scores, float32 `[n_kv_heads, n]` per layer, for `rank_rows`.

    The scores are unchanged unless the method keeps tokens whole or weighs the topic. Then they
    become ranks within their layer and head, which can be averaged over layers and heads and added
    to the similarity. group: the ranks that have the layers' other heads.
    """
    weighs_topic = bool(method.topic) and bool(segments)
    if not (method.whole_tokens or weighs_topic) or not scores:
        return list(scores)
    ranks = [row_ranks(score, held) for score, held in zip(scores, positions, strict=True)]
    if method.whole_tokens:
        tokens = TokenIndex.from_positions(positions)
        means = tokens.means(ranks, group)
        ranks = [means[rows] for rows in tokens.rows]
    if weighs_topic:
        ranks = [
            rank + method.topic * segment_similarity(segments, held)
            for rank, held in zip(ranks, positions, strict=True)
        ]
    return [
        rank.masked_fill(held == EMPTY, 0.0) for rank, held in zip(ranks, positions, strict=True)
    ]


def segment_similarity(segments: Sequence[EpisodeSegment], positions: Tensor) -> Tensor:
    """Similarity of each row's segment to the episode: float32 of the shape of `positions`.

    0 for tokens between segments; 1 for those after the last segment, which count as part of the
    episode. There is at least one segment.
    """
    ordered = sorted(segments, key=lambda segment: segment.start)
    device = positions.device
    starts = torch.tensor([s.start for s in ordered], dtype=positions.dtype, device=device)
    stops = torch.tensor([s.stop for s in ordered], dtype=positions.dtype, device=device)
    values = torch.tensor([s.similarity for s in ordered], device=device)
    # Absent rows, too, get an index: their similarity is arbitrary.
    at = torch.searchsorted(starts, positions.contiguous(), right=True) - 1
    inside = (at >= 0) & (positions < stops[at.clamp(min=0)])
    similarity = torch.where(inside, values[at.clamp(min=0)], 0.0)
    return similarity.masked_fill(positions >= stops.amax(), 1.0)
