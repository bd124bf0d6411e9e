"""AdaKV: SnapKV with a layer's budget shared unevenly between its heads."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from workers.methods.snapkv import SnapKV
from workers.primitives.selection import newest_first, top_over_heads


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV's scores, the best of all heads of a layer together, no head under its `floor` share of the budget.

    Source: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation" (2024), section 3.
    The floor is the rows that each head gets first, as in kvpress; the authors mix the uneven split with an even
    one, `alpha * uneven + (1 - alpha) * even`, which keeps other rows at the border. Uneven heads free memory here.
    """

    floor: Annotated[float, Field(ge=0, le=1)] = 0.2

    name: ClassVar[str] = "adakv"

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """The window in every head, each head's floor, then the best of all heads."""
        scores = newest_first(scores, positions, min(self.window, budget // 2))
        return top_over_heads(scores, positions, budget, int(budget * self.floor))
