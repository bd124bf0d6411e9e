"""How a session's budget is split over the layers: whole rows, no layer under a floor, the sum kept exactly."""

from collections.abc import Sequence
from math import floor as whole
from math import gcd

from kvrecall.domain.session_settings import LayerBudgets
from workers.errors import BadSettings

ALPHA = 1.1
"""How sharply sensitivity weighs (EpiCache eq. 10), as its authors set it for Llama."""
ALPHA_QWEN = 1.3
"""As its authors set it for Qwen."""
PYRAMID_BETA = 20.0
"""PyramidKV's deepest layer has 1/20 of the mean budget."""
MIN_SHARE = 0.75
"""The least part of the mean budget that sensitivity leaves to a layer; EpiCache's authors' code has a quarter.

The first layer's keys cannot deviate, whatever is evicted, so it always gets the least; with a quarter EpiCache falls
behind an even split on the reference model (evals/README.md, "What was tried").
"""


def split_budget(
    rows: int,
    n_layers: int,
    how: LayerBudgets,
    *,
    floor: int,
    weights: Sequence[float] | None = None,
    alpha: float = ALPHA,
) -> tuple[int, ...]:
    """Rows per KV head of each layer; they sum to `rows * n_layers` exactly.

    rows: the mean over the layers, at least `floor`, which every layer gets. weights: each layer's sensitivity
    `s_l`, 0 or more, only for "sensitivity", where no layer gets under three quarters of the mean either: the first
    layer's keys do not depend on attention, so its sensitivity is always 0. What falls short of the floor is
    filled up at the cost of the other layers, in proportion to their shares.

    Source: EpiCache, eq. 10, for "sensitivity"; Cai et al., "PyramidKV" (2024), section 3.2, for "pyramid".
    Raises BadSettings: `rows` is under `floor`, or "sensitivity" without a profile of this model.
    """
    if rows < floor:
        raise BadSettings(
            f"a budget of {rows} rows is under the {floor} rows that every layer keeps"
        )
    if how == "uniform":
        return (rows,) * n_layers
    if how == "pyramid":
        return _apportion(pyramid(n_layers), rows * n_layers, floor)
    if weights is None or len(weights) != n_layers:
        raise BadSettings(
            "layer budgets by sensitivity need a profile of the model's layers, and this worker has none: "
            "run `kvrecall profile-layers`, or ask for uniform or pyramid"
        )
    return _apportion(
        _sharpened(weights, alpha), rows * n_layers, max(floor, int(rows * MIN_SHARE))
    )


def pyramid(n_layers: int) -> list[float]:
    """Each layer's part of the mean budget: a line that falls from `2 - 1/beta` to `1/beta`."""
    last = 1 / PYRAMID_BETA
    first = 2 - last
    steps = max(1, n_layers - 1)
    return [first - (first - last) * layer / steps for layer in range(n_layers)]


def get_alpha(model_type: str) -> float:
    """The paper's alpha for a family of models, by its Hugging Face `model_type`."""
    return ALPHA_QWEN if model_type.startswith("qwen") else ALPHA


def share_within_groups(layer_rows: Sequence[int], group: int, *, floor: int) -> tuple[int, ...]:
    """The same rows for `group` consecutive layers, which share one selection: the group's mean, in whole rows.

    The last group may be smaller. The sum stays what it was, a multiple of the number of layers as `split` makes
    it, and no layer falls under `floor`.
    """
    total = sum(layer_rows)
    n_layers = len(layer_rows)
    assert total % n_layers == 0, "the split's sum is rows * n_layers"
    if group == 1:
        return tuple(layer_rows)
    if group >= n_layers:
        return (total // n_layers,) * n_layers
    odd = n_layers % group
    last_rows = _rows_of_last(layer_rows[n_layers - odd :], total // n_layers, group) if odd else 0
    means = [
        sum(layer_rows[start : start + group]) / group for start in range(0, n_layers - odd, group)
    ]
    of_groups = _apportion(means, (total - odd * last_rows) // group, floor)
    return (*(rows for rows in of_groups for _ in range(group)), *(last_rows,) * odd)


def _rows_of_last(last: Sequence[int], mean: int, group: int) -> int:
    """Rows of each layer of a smaller last group: near its mean, such that the others' sum divides by `group`."""
    step = group // gcd(group, len(last))
    return mean + step * int((sum(last) / len(last) - mean) / step)


def _sharpened(weights: Sequence[float], alpha: float) -> list[float]:
    """`s_l ** alpha`, of the largest; all the same if no layer is sensitive."""
    largest = max(weights)
    if largest <= 0:
        return [1.0] * len(weights)
    return [(max(weight, 0.0) / largest) ** alpha for weight in weights]


def _apportion(weights: Sequence[float], total: int, floor: int) -> tuple[int, ...]:
    """`total` whole rows by weight, largest remainders first, lower layers first among equals; none under `floor`."""
    shares = _filled(weights, total, floor)
    rows = [whole(share) for share in shares]
    by_remainder = sorted(range(len(rows)), key=lambda layer: rows[layer] - shares[layer])
    for layer in by_remainder[: total - sum(rows)]:
        rows[layer] += 1
    return tuple(rows)


def _filled(weights: Sequence[float], total: int, floor: int) -> list[float]:
    """Shares `max(floor, t * weight)`, with the t that makes them sum to `total`."""
    above = [layer for layer, weight in enumerate(weights) if weight > 0]
    while above:
        scale = (total - floor * (len(weights) - len(above))) / sum(
            weights[layer] for layer in above
        )
        still = [layer for layer in above if scale * weights[layer] >= floor]
        if len(still) == len(above):
            shares = [float(floor)] * len(weights)
            for layer in above:
                shares[layer] = scale * weights[layer]
            return shares
        above = still
    return [total / len(weights)] * len(weights)
