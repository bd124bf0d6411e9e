"""PyramidKV: SnapKV with a budget that falls with depth."""

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.domain.session_settings import LayerBudgets
from workers.methods.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores under a budget that falls linearly with depth: lower layers look at more of the text.

    Source: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" (2024),
    section 3.2; `workers.primitives.budgets.split` draws the line. kvpress has the same one, but falls back
    to equal layers where the deepest would get fewer rows than the window.
    """

    name: ClassVar[str] = "pyramidkv"
    layer_budgets: ClassVar[LayerBudgets] = "pyramid"
