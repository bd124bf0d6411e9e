"""How a session's budget is split over the layers."""

from typing import Literal

LayerBudgets = Literal["uniform", "pyramid", "sensitivity"]
"""The same in every layer, fewer with depth (PyramidKV), or by how much eviction moves a layer's keys (EpiCache)."""
