"""Summaries of a session's keys, as the native code descends through them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Summaries:
    """Where the summaries of all layers are, and how a descent goes through them.

    Attributes:
        described: Of each layer and level from 1 on the address of its nodes, float32
            `[n_kv_heads, .., 2 * head_dim]`, and how many numbers a head has; int64 `[n_layers, levels, 2]`.
        top: Level at which a descent begins, 1 or more.
        nodes: Nodes of a level that are drawn at most.
        level_rotation: Of the ranks of a level's nodes from those of the level below.
    """

    described: Tensor
    top: int
    nodes: int
    level_rotation: int
