"""SnapKV: what the last tokens attend to."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from workers import scoring
from workers.methods.base import LayerRows, Method
from workers.observation import Observation


@dataclass(frozen=True)
class SnapKV(Method):
    """Attention of the turn's last `window` tokens, mean over them and over a KV head's group, max-pooled.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024), section 4. Selection
    is per KV head. `group="max"` takes EpiCache's reduction (eq. 3) over the query heads instead of the mean.
    """

    window: Annotated[int, Field(ge=1, le=256)] = 32
    pool: Annotated[int, Field(ge=1, le=63)] = 7
    group: Literal["mean", "max"] = "mean"

    name: ClassVar[str] = "snapkv"

    @property
    def observation(self) -> Observation:
        """The turn's last `window` tokens."""
        return Observation(window=self.window)

    def scores(self, rows: LayerRows) -> Tensor:
        """Pooled attention; without an observed token every row scores the same."""
        if not rows.query_positions.numel():
            return torch.zeros_like(rows.positions, dtype=torch.float32)
        weights = scoring.attention(rows.queries, rows.keys, rows.positions, rows.query_positions)
        return scoring.smooth(scoring.over_tokens_and_group(weights, tokens="mean", group=self.group), self.pool)
