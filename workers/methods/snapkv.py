"""SnapKV: what the last tokens attend to."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from workers import scoring
from workers.methods.base import LayerRows
from workers.selection import top_per_head


@dataclass(frozen=True)
class SnapKV:
    """Attention of the turn's last `window` tokens, mean over them and over a KV head's group, max-pooled.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024), section 4. Selection
    is per KV head. `group="max"` takes EpiCache's reduction (eq. 3) over the query heads instead of the mean.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    window: Annotated[int, Field(ge=1, le=256)] = 32
    pool: Annotated[int, Field(ge=1, le=63)] = 7
    group: Literal["mean", "max"] = "mean"

    name: ClassVar[str] = "snapkv"
    evicts: ClassVar[bool] = True

    @property
    def observes(self) -> int:
        """The turn's last `window` tokens."""
        return self.window

    def scores(self, rows: LayerRows) -> Tensor:
        """Pooled attention; without an observed token every row scores the same."""
        if not rows.query_positions.numel():
            return torch.zeros_like(rows.positions, dtype=torch.float32)
        weights = scoring.attention(rows.queries, rows.keys, rows.positions, rows.query_positions)
        return scoring.smooth(scoring.over_tokens_and_group(weights, tokens="mean", group=self.group), self.pool)

    def select(self, scores: Tensor, rows: LayerRows, budget: int) -> Tensor:
        """The best per head."""
        return top_per_head(scores, rows.positions, budget)
