"""H2O: heavy hitters, and a share of the budget for the most recent rows."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import H2OSettings
from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.selection import newest_first, top_per_head


@dataclass(frozen=True)
class H2O(H2OSettings, Method):
    """Accumulated attention from every query so far, and the most recent rows.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models" (2023), section 4.

    Deviations: with grouped queries the attention is the mean over the group. The paper's sum
    favours old rows; `per_query` divides it as kvpress does (with `recent=0`).
    """

    name: ClassVar[str] = "h2o"

    @property
    def observation(self) -> Observation:
        """Every query; its attention is accumulated with the rows."""
        return Observation(accumulate="attention")

    def scores(self, rows: LayerRows) -> Tensor:
        """Accumulated attention, per query if `per_query`."""
        if not self.per_query:
            return rows.accumulated.float()
        return rows.accumulated.float() / (rows.end - rows.positions).clamp(min=1)

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Select the most recent rows, then the heavy hitters of each head."""
        scores = newest_first(scores, positions, int(budget * self.recent))
        return top_per_head(scores, positions, budget)
