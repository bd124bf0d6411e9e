"""SnapKV: attention of an observation window."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import SnapKVSettings
from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import AttentionPooling, attention_scores, smooth_before
from workers.primitives.selection import newest_first, top_per_head


@dataclass(frozen=True)
class SnapKV(SnapKVSettings, Method):
    """Mean attention of the turn's last `window` tokens, pooled along the sequence.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024),
    section 4. Selection is per KV head. The window is kept, in at most half of the budget, and is
    not pooled.

    Deviations: the authors' code pools each query head before the mean over a KV head's group, ours
    pools the mean; with `pooling="mean"` both are the same. `group="max"` is EpiCache's reduction
    (eq. 3). kvpress has window 64, mean pooling, width 5.
    """

    name: ClassVar[str] = "snapkv"

    @property
    def observation(self) -> Observation:
        """The turn's last `window` tokens."""
        return Observation(window=self.window)

    @property
    def attention_pooling(self) -> AttentionPooling:
        """The pooling of the scores."""
        return AttentionPooling(self.group, self.pool, self.pooling)

    def scores(self, rows: LayerRows) -> Tensor:
        """Pooled attention; without an observed token every row has the same score."""
        scores = attention_scores(
            rows.queries,
            rows.keys,
            rows.positions,
            rows.query_positions,
            tokens="mean",
            group=self.group,
        )
        first = rows.end - rows.query_positions.numel()
        return smooth_before(scores, rows.positions, first, self.pool, self.pooling)

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Select the window, then the best of each head."""
        scores = newest_first(scores, positions, min(self.window, budget // 2))
        return top_per_head(scores, positions, budget)
