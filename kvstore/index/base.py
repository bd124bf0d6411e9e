"""Protocol of an index over a layer's keys: it narrows down which keys a query has to be compared to."""

from typing import Protocol

from torch import Tensor


class KeyIndex(Protocol):
    """An index of the keys of one session's layer, over all of its KV heads.

    A row is named by its position. The index finds candidates; their exact logits are computed by
    its caller from the keys themselves, which it does not hold. Without an index every row is a
    candidate.

    What it finds is a function of the keys, the order in which they were added and its settings.
    """

    @property
    def rows(self) -> int:
        """Rows per KV head that are indexed: the positions before it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index occupies."""
        ...

    def extend(self, keys: Tensor) -> None:
        """Index the rows from position `rows` on; keys: all of the layer, `[n_kv_heads, n, d]`."""
        ...

    def candidates(self, queries: Tensor) -> Tensor:
        """Find the rows that a group of queries may attend to most.

        queries: float32 `[n_kv_heads, q, head_dim]`, after RoPE. Returns positions, int64
        `[n_kv_heads, m]`, each once, -1 for none, in any order.
        """
        ...

    def truncate(self, rows: int) -> None:
        """Forget the rows from position `rows` on."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless every row is indexed exactly once in every head."""
        ...
