"""SnapKV: what the last tokens attend to."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import Reduction, attention_scores, smooth_before
from workers.primitives.selection import newest_first, top_per_head


@dataclass(frozen=True)
class SnapKV(Method):
    """Attention of the turn's last `window` tokens, mean over them and over a KV head's group, max-pooled.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024), section 4. The window
    itself is kept, in at most half of the budget, and is not pooled. Selection is per KV head. `group="max"` takes
    EpiCache's reduction (eq. 3) over the query heads instead of the mean. The authors' code pools each query head
    before the mean, ours the mean; with `pooling="mean"` that is the same. kvpress has window 64, mean, width 5.
    """

    window: Annotated[int, Field(ge=1, le=256)] = 32
    pool: Annotated[int, Field(ge=1, le=63)] = 7
    pooling: Reduction = "max"
    group: Reduction = "mean"

    name: ClassVar[str] = "snapkv"

    @property
    def observation(self) -> Observation:
        """The turn's last `window` tokens."""
        return Observation(window=self.window)

    def scores(self, rows: LayerRows) -> Tensor:
        """Pooled attention; without an observed token every row scores the same."""
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
        """The window, then the best per head."""
        scores = newest_first(scores, positions, min(self.window, budget // 2))
        return top_per_head(scores, positions, budget)
