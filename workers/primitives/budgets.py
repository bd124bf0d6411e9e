"""The split of a session's budget over the layers, in whole rows, with a floor for each layer."""

import math
from collections.abc import Sequence

from kvrecall.domain.settings.session import LayerBudgets
from workers.errors import BadSettings

# Exponent of the sensitivity (EpiCache eq. 10), as its authors set it for Llama and for Qwen.
ALPHA = 1.1
ALPHA_QWEN = 1.3

# PyramidKV's deepest layer has 1/20 of the mean budget.
PYRAMID_BETA = 20.0

# Minimum share of the mean budget that "sensitivity" leaves to a layer; 0.25 in EpiCache's authors'
# code. The first layer's keys cannot deviate, whatever is evicted, so it always gets the minimum;
# with a quarter EpiCache falls behind an even split on the reference model (evals/README.md, "What
# was tried").
MIN_SHARE = 0.75


def split_budget(
    rows: int,
    n_layers: int,
    split: LayerBudgets,
    *,
    floor: int,
    weights: Sequence[float] | None = None,
    alpha: float = ALPHA,
) -> tuple[int, ...]:
    """Split a budget over the layers; the rows sum to `rows * n_layers` exactly.

    Layers that would fall short of their floor get it at the cost of the others, in proportion to
    their shares.

    Source: EpiCache, eq. 10, for "sensitivity"; Cai et al., "PyramidKV" (2024), section 3.2, for
    "pyramid".

    Args:
        rows: Rows per KV head, mean over the layers.
        n_layers: Number of layers.
        split: Kind of split.
        floor: Minimum rows per KV head of every layer.
        weights: Each layer's sensitivity `s_l`, 0 or more; only for "sensitivity", which also
            leaves every layer at least `MIN_SHARE` of the mean.
        alpha: Exponent of the sensitivity.

    Returns:
        Rows per KV head of each layer.

    Raises:
        BadSettings: `rows` is under `floor`, or "sensitivity" without a profile of this model.
    """
    if rows < floor:
        raise BadSettings(
            f"a budget of {rows} rows is under the {floor} rows that every layer keeps"
        )
    if split == "uniform":
        return (rows,) * n_layers
    if split == "pyramid":
        return _apportion(pyramid_weights(n_layers), rows * n_layers, floor)
    if weights is None or len(weights) != n_layers:
        raise BadSettings(
            "layer budgets by sensitivity need a profile of the model's layers, and this worker "
            "has none: run `kvrecall profile-layers`, or ask for uniform or pyramid"
        )
    least = max(floor, int(rows * MIN_SHARE))
    return _apportion(_sharpen(weights, alpha), rows * n_layers, least)


def pyramid_weights(n_layers: int) -> list[float]:
    """Each layer's share of the mean budget: a line that falls from `2 - 1/beta` to `1/beta`."""
    last = 1 / PYRAMID_BETA
    first = 2 - last
    steps = max(1, n_layers - 1)
    return [first - (first - last) * layer / steps for layer in range(n_layers)]


def get_alpha(model_type: str) -> float:
    """Look up the paper's alpha for a family of models, by its Hugging Face `model_type`."""
    return ALPHA_QWEN if model_type.startswith("qwen") else ALPHA


def share_within_groups(layer_rows: Sequence[int], group: int, *, floor: int) -> tuple[int, ...]:
    """Give `group` consecutive layers, which share one selection, the same number of rows.

    Each group gets its mean, in whole rows; the last group may be smaller. The sum stays the same
    (a multiple of the number of layers, as `split_budget` returns it), and no layer falls under
    `floor`.
    """
    total = sum(layer_rows)
    n_layers = len(layer_rows)
    assert total % n_layers == 0, "the split's sum is rows * n_layers"
    if group == 1:
        return tuple(layer_rows)
    if group >= n_layers:
        return (total // n_layers,) * n_layers
    odd = n_layers % group
    last = layer_rows[n_layers - odd :]
    last_rows = _last_group_rows(last, total // n_layers, group) if odd else 0
    means = [
        sum(layer_rows[start : start + group]) / group for start in range(0, n_layers - odd, group)
    ]
    group_rows = _apportion(means, (total - odd * last_rows) // group, floor)
    return (*(rows for rows in group_rows for _ in range(group)), *(last_rows,) * odd)


def _last_group_rows(last: Sequence[int], mean: int, group: int) -> int:
    """Rows of each layer of a smaller last group.

    They are near the group's mean, such that the sum of the other layers is divisible by `group`.
    """
    step = group // math.gcd(group, len(last))
    return mean + step * int((sum(last) / len(last) - mean) / step)


def _sharpen(weights: Sequence[float], alpha: float) -> list[float]:
    """`s_l ** alpha` relative to the largest; uniform if no layer is sensitive."""
    largest = max(weights)
    if largest <= 0:
        return [1.0] * len(weights)
    return [(max(weight, 0.0) / largest) ** alpha for weight in weights]


def _apportion(weights: Sequence[float], total: int, floor: int) -> tuple[int, ...]:
    """Apportion `total` whole rows by weight, by largest remainder; no layer is under `floor`.

    Of equal remainders the lower layer's goes first.
    """
    shares = _fill_to_floor(weights, total, floor)
    rows = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(rows)), key=lambda layer: rows[layer] - shares[layer])
    for layer in by_remainder[: total - sum(rows)]:
        rows[layer] += 1
    return tuple(rows)


def _fill_to_floor(weights: Sequence[float], total: int, floor: int) -> list[float]:
    """Shares `max(floor, t * weight)`, with the t that makes them sum to `total`."""
    above = [layer for layer, weight in enumerate(weights) if weight > 0]
    while above:
        left = total - floor * (len(weights) - len(above))
        scale = left / sum(weights[layer] for layer in above)
        still_above = [layer for layer in above if scale * weights[layer] >= floor]
        if len(still_above) == len(above):
            shares = [float(floor)] * len(weights)
            for layer in above:
                shares[layer] = scale * weights[layer]
            return shares
        above = still_above
    return [total / len(weights)] * len(weights)
