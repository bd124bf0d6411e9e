"""StreamingLLM: sinks and the most recent rows."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.scoring import recency
from workers.primitives.selection import top_per_head


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Position alone: the first `sinks` tokens and, in what the budget leaves, the newest.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), section 3.2; true
    positions are kept here where the paper renumbers them inside the cache. The sinks take at most half the budget.
    """

    sinks: Annotated[int, Field(ge=0, le=4096)] = 4

    name: ClassVar[str] = "streaming_llm"

    def scores(self, rows: LayerRows) -> Tensor:
        """The later the better, sinks first of all."""
        return recency(rows.positions, self.sinks)

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """The best per head."""
        if self.sinks > budget // 2:
            # What the engine protects has an infinite score, and keeps it.
            scores = torch.where(scores.isposinf(), scores, recency(positions, budget // 2))
        return top_per_head(scores, positions, budget)
