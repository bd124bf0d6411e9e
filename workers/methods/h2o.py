"""H2O: heavy hitters, and half of the budget for the most recent."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.selection import newest_first, top_per_head


@dataclass(frozen=True)
class H2O(Method):
    """The attention that a row got from every query so far, and the most recent rows in half of the budget.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (2023), section 4. With grouped queries the attention is the mean over the group. `per_query` divides by the
    queries that could see the row, as kvpress does (with `recent=0`): the paper's sum favours old rows.
    """

    recent: Annotated[float, Field(ge=0, le=1)] = 0.5
    per_query: bool = False

    name: ClassVar[str] = "h2o"

    @property
    def observation(self) -> Observation:
        """Every query, its attention added up with the rows."""
        return Observation(accumulate="attention")

    def scores(self, rows: LayerRows) -> Tensor:
        """What was added up."""
        if not self.per_query:
            return rows.accumulated.float()
        return rows.accumulated.float() / (rows.end - rows.positions).clamp(min=1)

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """The most recent, then the heavy hitters of each head."""
        scores = newest_first(scores, positions, int(budget * self.recent))
        return top_per_head(scores, positions, budget)
