"""EpiCache: what the active episode attends to."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from workers.budgets import LayerBudgets
from workers.methods.base import LayerRows, Method
from workers.observation import Observation
from workers.scoring import Reduction, attended, smooth
from workers.selection import top_over_heads, top_per_head


@dataclass(frozen=True)
class EpiCache(Method):
    """Attention of the active episode's medoid segment, max over its tokens and over a KV head's group.

    Source: Kim et al., "EpiCache: Episodic KV Cache Management for Long Conversational Question Answering" (2025),
    section 3.1 and eq. 3; layer budgets by sensitivity, section 3.2. A layer's budget is shared between its heads
    by score, as in the authors' code. `prompt` stands before the medoid, as there. Before there are episodes the
    last `window` tokens are observed. The last four settings are for building episodes from all rows at once
    (`episode_scoring.EpisodeScoring`); evictions do not look at them.
    """

    window: Annotated[int, Field(ge=1, le=256)] = 64
    prompt: Annotated[str, Field(max_length=2000)] = "Extract the essential information of this conversation."
    reduce: Reduction = "max"
    pool_heads: bool = True
    pool: Annotated[int, Field(ge=1, le=63)] = 1
    members_first: bool = False
    members_bonus: Annotated[float, Field(ge=0, le=1000)] = 0.0
    keep_sinks: bool = True
    keep_recent: bool = False

    name: ClassVar[str] = "epicache"
    layer_budgets: ClassVar[LayerBudgets] = "sensitivity"

    @property
    def observation(self) -> Observation:
        """The episode's patched prompt, or the window."""
        return Observation(window=self.window, prompt=self.prompt, episode=True)

    def scores(self, rows: LayerRows) -> Tensor:
        """The observed tokens' attention, smoothed over neighbours where `pool` says so."""
        scores = attended(
            rows.queries, rows.keys, rows.positions, rows.query_positions, tokens=self.reduce, group=self.reduce
        )
        return smooth(scores, self.pool)

    def select(self, scores: Tensor, rows: LayerRows, budget: int) -> Tensor:
        """The best of all heads together, or per head."""
        select = top_over_heads if self.pool_heads else top_per_head
        return select(scores, rows.positions, budget)
