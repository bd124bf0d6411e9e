"""Searched rows of a session that a step may draw."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SearchedRows:
    """Rows of one layer of a session, all of which a search scores.

    Attributes:
        keys: A view `[n_kv_heads, n, head_dim]` on the host; the rows of a head lie one after the other.
        values: A view of the same shape and strides.
        ranks: Ranks of the positions, and of those that a rotation adds, float32, see
            `workers.retrieval.sampling.Ranks`.
        count: Rows per KV head that are drawn at most, 1 or more.
    """

    keys: Tensor
    values: Tensor
    ranks: Tensor
    count: int
