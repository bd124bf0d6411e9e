"""Searched rows of a session that a step may draw."""

from dataclasses import dataclass

from torch import Tensor

from kvstore.index.paged_rows import PagedRows


@dataclass(frozen=True, eq=False)
class SearchedRows:
    """Rows of one layer of a session, all of which a search scores.

    Attributes:
        rows: The session's rows, on the host.
        layer: The layer.
        codes: Addresses of the codes of the pages' keys, int64 `[n_pages]`, see
            `kvstore.index.key_codes.KeyCodes`.
        ranks: Ranks of the positions, and of those that a rotation adds, float32, see
            `workers.retrieval.sampling.Ranks`.
        count: Rows per KV head that are drawn at most, 1 or more.
    """

    rows: PagedRows
    layer: int
    codes: Tensor
    ranks: Tensor
    count: int
