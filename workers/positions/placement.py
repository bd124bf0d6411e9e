"""Places of a pass's tokens and of the rows that it attends to, where a session is behind its window."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.positions.seen_rows import SeenRows


class Placement:
    """The places of one pass over B sessions, for the layers of one kind (`ForwardStep.placement`).

    Attributes:
        query_positions: At which the model computes the new tokens, int32 `[B, t]`.
        seen: How each session sees its rows; None for one within the window, which sees them where they
            were computed.
    """

    def __init__(self, query_positions: Tensor, seen: Sequence[SeenRows | None]) -> None:
        """Begin a pass."""
        self.query_positions = query_positions
        self.seen = tuple(seen)

    def turn(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Turn keys `[B, n_kv_heads, n, head_dim]` of positions, int32 `[B, n_kv_heads, n]`, to where they are seen."""
        pairs = zip(self.seen, keys, positions, strict=True)
        return torch.stack(
            [own if seen is None else seen.turn(layer, own, at) for seen, own, at in pairs]
        )
