"""PyramidKV: SnapKV with a budget that falls with depth."""

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.domain.settings.session import LayerBudgets
from workers.methods.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores under a budget that falls linearly with depth.

    Source: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
    Funneling" (2024), section 3.2: lower layers attend to more of the text. The budgets are those
    of `workers.primitives.budgets.split_budget`. kvpress draws the same line, but uses equal layers
    where the deepest one would get fewer rows than the window.
    """

    name: ClassVar[str] = "pyramidkv"
    layer_budgets: ClassVar[LayerBudgets] = "pyramid"
