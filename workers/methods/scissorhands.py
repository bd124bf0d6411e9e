"""Scissorhands: rows that are attended to persistently."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import ScissorhandsSettings
from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.selection import newest_first, top_per_head


@dataclass(frozen=True)
class Scissorhands(ScissorhandsSettings, Method):
    """Share of the queries that gave a row more than uniform attention, and the most recent rows.

    Source: Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM
    KV Cache Compression at Test Time" (2023), section 4.1, Algorithm 2.

    Deviations: the paper counts misses over the last 400 queries; here every query since the row
    was appended counts, as a share, so that rows of different ages compare. The most recent rows
    take at most half of the budget.
    """

    name: ClassVar[str] = "scissorhands"

    @property
    def observation(self) -> Observation:
        """Every query; its hits are accumulated with the rows."""
        return Observation(accumulate="hits")

    def scores(self, rows: LayerRows) -> Tensor:
        """Hits per query that could see the row."""
        return rows.accumulated.float() / (rows.end - rows.positions).clamp(min=1)

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Select the most recent rows, then the best of each head."""
        scores = newest_first(scores, positions, min(self.recent, budget // 2))
        return top_per_head(scores, positions, budget)
