"""Selections of the heads of several ranks: joined for the catalog, whose states have all heads."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from workers.cache.active_cache import EMPTY
from workers.engine.selection import Selection
from workers.parallel.group import Group


def join_heads(selection: Selection | None, group: Group) -> Selection | None:
    """Join the ranks' selections along the heads, on every rank; None where the session has none."""
    if group.count == 1 or selection is None:
        return selection
    parts = [Selection.from_bytes(each) for each in group.gather(selection.to_bytes())]

    def join(layers: Sequence[tuple[Tensor, ...]], empty: float) -> tuple[Tensor, ...]:
        return tuple(_join_layer(each, empty) for each in zip(*layers, strict=True))

    return Selection(
        join([part.positions for part in parts], EMPTY),
        join([part.promoted for part in parts], False),
        join([part.accumulated for part in parts], 0),
    )


def take_heads(selection: Selection, group: Group) -> Selection:
    """Take this rank's heads of a selection of all."""
    if group.count == 1:
        return selection
    heads = len(selection.positions[0]) // group.count
    own = slice(group.index * heads, (group.index + 1) * heads)
    # The others' heads may be longer.
    lengths = [int((each[own] != EMPTY).sum(1).max()) for each in selection.positions]

    def take(layers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(
            each[own, :length].contiguous() for each, length in zip(layers, lengths, strict=False)
        )

    return Selection(
        take(selection.positions), take(selection.promoted), take(selection.accumulated)
    )


def _join_layer(parts: Sequence[Tensor], empty: float) -> Tensor:
    longest = max(each.shape[1] for each in parts)
    return torch.cat([pad(each, (0, longest - each.shape[1]), value=empty) for each in parts])
