"""AdaKV: SnapKV with a layer's budget shared unevenly between its heads."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import AdaKVSettings
from workers.methods.snapkv import SnapKV
from workers.primitives.selection import newest_first, top_over_heads


@dataclass(frozen=True)
class AdaKV(AdaKVSettings, SnapKV):
    """SnapKV's scores, selected over all heads of a layer with a minimum share for each head.

    Source: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation"
    (2024), section 3.

    Deviations: each head first gets its `floor` share of the budget, as in kvpress; the authors mix
    the uneven split with an even one, `alpha * uneven + (1 - alpha) * even`, which selects other
    rows at the margin. Here uneven heads free memory.
    """

    name: ClassVar[str] = "adakv"

    @property
    def divides_unevenly(self) -> bool:
        """True: the best rows of all heads stay."""
        return True

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Select the window in every head, each head's floor, then the best of all heads."""
        scores = newest_first(scores, positions, min(self.window, budget // 2))
        return top_over_heads(scores, positions, budget, int(budget * self.floor))
