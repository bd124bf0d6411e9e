"""Report of what a model's layers keep, and of the bytes that it takes."""

from collections import Counter

import torch

from kvrecall.domain.worker_info import LayerKind
from workers.cache.layer_plan import LayerPlan
from workers.cache.side_cache import SideShape
from workers.cache.slot_pool import KVShape


def describe_layers(
    plan: LayerPlan, shape: KVShape, side: SideShape | None, dtype: torch.dtype
) -> list[LayerKind]:
    """Describe a model's layers by kind; a layer of two kinds counts for both.

    shape, side: of the managed rows, and of what layers keep beside them; dtype: of the rows.
    """
    name = "latent attention" if shape.latent else "full attention"
    kinds = [LayerKind(name, shape.n_layers, token_bytes=_count_bytes(shape, dtype))]
    if side is not None and side.windows is not None:
        per_layer = _count_bytes(side.windows, dtype) // side.windows.n_layers
        counts = Counter(window.describe() for window in plan.windows.values())
        kinds += [LayerKind(kind, n, token_bytes=n * per_layer) for kind, n in counts.items()]
    if side is not None and plan.states:
        kinds.append(LayerKind("recurrent state", len(plan.states), state_bytes=side.state_bytes))
    if plan.shared:
        kinds.append(LayerKind("rows of another layer", len(plan.shared)))
    keeping = {*plan.rows, *plan.windows, *plan.states, *plan.shared}
    if nothing := plan.n_layers - len(keeping):
        kinds.append(LayerKind("no past", nothing))
    return kinds


def _count_bytes(shape: KVShape, dtype: torch.dtype) -> int:
    """Count the bytes of a token's rows in all layers."""
    return shape.n_layers * shape.n_kv_heads * shape.row_bytes(dtype)
