"""StreamingLLM: sinks and the most recent rows."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.domain.settings.methods import StreamingLLMSettings
from workers.methods.base import LayerRows, Method
from workers.primitives.scoring import recency
from workers.primitives.selection import top_per_head


@dataclass(frozen=True)
class StreamingLLM(StreamingLLMSettings, Method):
    """The first `sinks` tokens and the newest rows, by position alone.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023),
    section 3.2.

    Deviations: rows keep their true positions; the paper renumbers them inside the cache. The sinks
    take at most half of the budget.
    """

    name: ClassVar[str] = "streaming_llm"

    def first_kept(self, rows: int) -> int:
        """The sinks."""
        return min(self.sinks, rows // 2)

    def scores(self, rows: LayerRows) -> Tensor:
        """Higher scores for later positions; sinks above all."""
        return recency(rows.positions, self.sinks)

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Select the best of each head, with sinks in at most half of the budget."""
        sinks = self.first_kept(budget)
        if self.sinks > sinks:
            # Rows that the engine protects have an infinite score, and keep it.
            scores = torch.where(scores.isposinf(), scores, recency(positions, sinks))
        return top_per_head(scores, positions, budget)
