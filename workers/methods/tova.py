"""TOVA: attention of the last token."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import attention_scores
from workers.primitives.selection import newest_first, top_per_head
from workers.primitives.tokens import over_heads


@dataclass(frozen=True)
class TOVA(Method):
    """Attention of the last token, mean over all heads, so that every head keeps the same tokens.

    Source: Oren et al., "Transformers are Multi-State RNNs" (2024), section 3.2.

    Deviations: the paper evicts a row at every token; here rows are evicted at the end of a block.
    The last token is kept, as in kvpress.
    """

    name: ClassVar[str] = "tova"

    @property
    def observation(self) -> Observation:
        """The last token."""
        return Observation(window=1)

    def scores(self, rows: LayerRows) -> Tensor:
        """Attention of the last token; without one every row has the same score."""
        scores = attention_scores(
            rows.queries,
            rows.keys,
            rows.positions,
            rows.query_positions,
            tokens="mean",
            group="mean",
        )
        heads = scores.shape[0] * rows.group.count
        return over_heads(scores, rows.positions, rows.group) / heads

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Select the last token, then the best of each head."""
        return top_per_head(newest_first(scores, positions, 1), positions, budget)
