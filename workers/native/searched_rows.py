"""Searched rows of a session that a step may draw."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SearchedRows:
    """Rows of one layer of a session, all of which a search scores.

    Attributes:
        memory: Keys and values of the rows, and room behind them, `[2, n_kv_heads, capacity, head_dim]`,
            contiguous, on the host; `[1, ...]` where values are the keys.
        length: Rows of each head.
        ranks: Ranks of the positions, and of those that a rotation adds, float32, see
            `workers.retrieval.sampling.Ranks`.
        count: Rows per KV head that are drawn at most, 1 or more.
    """

    memory: Tensor
    length: int
    ranks: Tensor
    count: int
