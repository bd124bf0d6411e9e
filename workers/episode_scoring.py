"""Which rows make an episode: pure functions of scores and positions, with what can be tried as a value."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache import EMPTY
from workers.methods import LayerRows, Method
from workers.methods.epicache import EpiCache
from workers.scoring import Reduction, smooth
from workers.selection import protected


@dataclass(frozen=True)
class EpisodeScoring:
    """How an episode's rows are scored and which stay whatever they score; the defaults are the paper's.

    - `reduce`: how the patched prompt's weights become one score (EpiCache eq. 3: max over tokens and group).
    - `pooling`: each score becomes the most among so many consecutive tokens; 1: its own.
    - `members_first`: rows of the episode's own segments rank before all others.
    - `members_bonus`: what the score of a member gains, in means of its head's scores.
    - `sinks`, `recent`: whether the worker's sinks and recent window are kept whatever they score.
    """

    reduce: Reduction = "max"
    pooling: int = 1
    members_first: bool = False
    members_bonus: float = 0.0
    sinks: bool = True
    recent: bool = False

    @classmethod
    def of(cls, method: Method) -> "EpisodeScoring":
        """As a session's method says; EpiCache has settings for it, any other gets the paper's way."""
        if not isinstance(method, EpiCache):
            return cls()
        return cls(
            reduce=method.reduce,
            pooling=method.pool,
            members_first=method.members_first,
            members_bonus=method.members_bonus,
            sinks=method.keep_sinks,
            recent=method.keep_recent,
        )


@dataclass(frozen=True)
class LayerChoice:
    """What to choose a layer's rows with: the session's method, `rows` per KV head, and what it may not give up.

    `end` is the position after the newest row; sinks and recent are numbers of rows.
    """

    method: Method
    layer: int
    rows: int
    end: int
    sinks: int
    recent: int
    seed: int


def prefer_members(scores: Tensor, members: Tensor, *, first: bool = False, bonus: float = 0.0) -> Tensor:
    """Scores in which the episode's own tokens count for more: float32 `[n_kv_heads, n]`, the same order within each.

    scores: 0 to 1, float32 `[n_kv_heads, n]`; members: bool `[n]`. With neither `first` nor `bonus` nothing changes.
    """
    if bonus:
        scores = scores + members * (bonus * scores.mean(1, keepdim=True))
    if first:
        # Below every member: members keep their exact scores.
        scores = torch.where(members, scores, scores - scores.amax() - 1)
    return scores


def episode_scores(attended: Tensor, members: Tensor, scoring: EpisodeScoring) -> Tensor:
    """Attention that a patched prompt pays, float32 `[n_kv_heads, n]`, as scores to choose an episode's rows by."""
    pooled = smooth(attended, scoring.pooling)
    return prefer_members(pooled, members, first=scoring.members_first, bonus=scoring.members_bonus)


def choose_of_all(scores: Tensor, choice: LayerChoice) -> Tensor:
    """The method's own selection among all rows of a layer: int64 positions `[n_kv_heads, m]`, -1 at a head's end.

    scores: float32 `[n_kv_heads, n]`, one for each position.
    """
    positions = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device).expand(scores.shape[0], -1)
    return _select(scores, positions, choice)


def choose_with_newer(positions: Tensor, scores: Tensor, newer: Tensor, choice: LayerChoice) -> Tensor:
    """An episode's rows and the newer ones beside them, within the budget: int64 positions, -1 at a head's end.

    positions int32, scores float32 `[n_kv_heads, m]`: the episode's, `EMPTY` where there is none; newer int32
    `[n_kv_heads, k]`: rows that came after it was built, ascending. Of these the newest stay, at most half the
    layer's rows, and the episode's lowest scores give way to them.
    """
    kept = newest(newer, choice.rows // 2)
    merged, order = torch.cat([positions, kept], dim=1).sort(dim=1, stable=True)
    ranked = torch.cat([scores, torch.full_like(kept, torch.inf, dtype=torch.float32)], dim=1).gather(1, order)
    places = _select(ranked, merged, choice)
    return torch.where(places < 0, -1, merged.gather(1, places.clamp(min=0)).long())


def newest(positions: Tensor, rows: int) -> Tensor:
    """Each head's `rows` last ones of int32 `[n_kv_heads, k]`; the others become `EMPTY`."""
    from_the_end = (positions != EMPTY).flip(1).cumsum(1).flip(1)
    return torch.where(from_the_end <= rows, positions, EMPTY)


def marks(positions: Tensor, length: int) -> Tensor:
    """Positions `[n_kv_heads, m]`, negative or `EMPTY` for none, as bool `[n_kv_heads, length]`."""
    marked = torch.zeros(positions.shape[0], length + 1, dtype=torch.bool, device=positions.device)
    where = torch.where(positions < 0, length, positions.clamp(max=length)).long()
    return marked.scatter_(1, where, True)[:, :length]


def listed(marked: Tensor) -> Tensor:
    """bool `[n_kv_heads, n]` as indices: int64 `[n_kv_heads, m]`, ascending, -1 at a shorter head's end."""
    n = marked.shape[1]
    indices = torch.where(marked, torch.arange(n, device=marked.device), n).sort(dim=1).values
    indices = indices[:, : int(marked.sum(1).max()) if marked.numel() else 0]
    return torch.where(indices < n, indices, -1)


def _select(scores: Tensor, positions: Tensor, choice: LayerChoice) -> Tensor:
    """The places that the method keeps; `base.Method.select` has the shapes."""
    held = positions != EMPTY
    kept = protected(
        positions, sinks=choice.sinks, recent=choice.recent, turn_start=choice.end, turn_rows=0, end=choice.end
    )
    nothing = torch.zeros((), device=scores.device).expand(*positions.shape, 0)
    rows = LayerRows(
        layer=choice.layer,
        keys=nothing,
        values=nothing,
        positions=positions,
        queries=nothing[:, :0],
        query_positions=positions[0, :0],
        accumulated=torch.zeros_like(scores),
        end=choice.end,
        seed=choice.seed,
    )
    return choice.method.select(scores.masked_fill(kept & held, torch.inf), rows, choice.rows)
