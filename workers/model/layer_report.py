"""Report of what a model's layers keep, and of the bytes that it takes."""

from collections import Counter

from kvrecall.domain.worker_info import LayerKind
from workers.model.loader import LoadedModel


def describe_layers(model: LoadedModel) -> list[LayerKind]:
    """Describe the model's layers by kind; a layer of two kinds counts for both."""
    shape, plan = model.shape, model.plan
    row_bytes = shape.n_kv_heads * shape.row_bytes(model.dtype)
    name = "latent attention" if shape.latent else "full attention"
    kinds = [LayerKind(name, shape.n_layers, token_bytes=shape.n_layers * row_bytes)]
    if model.side is not None and model.side.windows is not None:
        windows = model.side.windows
        per_layer = windows.n_kv_heads * windows.row_bytes(model.dtype)
        counts = Counter(window.describe() for window in plan.windows.values())
        kinds += [LayerKind(kind, n, token_bytes=n * per_layer) for kind, n in counts.items()]
    if plan.states:
        kinds.append(LayerKind("recurrent state", len(plan.states), state_bytes=model.state_bytes))
    if plan.shared:
        kinds.append(LayerKind("rows of another layer", len(plan.shared)))
    keeping = {*plan.rows, *plan.windows, *plan.states, *plan.shared}
    if nothing := plan.n_layers - len(keeping):
        kinds.append(LayerKind("no past", nothing))
    return kinds
