"""Searched rows of a session that a step may draw."""

from dataclasses import dataclass, replace

from torch import Tensor

from kvstore.index.paged_rows import PagedRows
from workers.positions.seen_rows import SeenRows


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
        seen: Of a session behind the model's window: how its queries see the rows.
        turned: Theirs to each segment of rows, scaled, contiguous float32 `[segments, n_kv_heads, group,
            head_dim]`; None: all rows are asked alike.
    """

    rows: PagedRows
    layer: int
    codes: Tensor
    ranks: Tensor
    count: int
    seen: SeenRows | None = None
    turned: Tensor | None = None

    def asked_by(self, queries: Tensor, scale: float, seen: SeenRows) -> "SearchedRows":
        """Let the rows be asked from behind the model's window; queries: `[n_kv_heads, group, head_dim]`."""
        turned = seen.turn_queries(self.layer, queries.float() * scale).contiguous()
        return replace(self, seen=seen, turned=turned)
