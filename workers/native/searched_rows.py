"""Searched rows of a session that a step may draw."""

from dataclasses import dataclass, replace

from torch import Tensor

from kvstore.index.paged_rows import PagedRows
from kvstore.index.summaries import FANOUT
from workers.native.summaries import Summaries
from workers.positions.seen_rows import SeenRows


@dataclass(frozen=True, eq=False)
class SearchedRows:
    """Rows of one layer of a session, of which a search scores all, or those that a descent comes to.

    Attributes:
        rows: The session's rows, on the host.
        layer: The layer.
        codes: Addresses of the codes of the pages' keys, int64 `[n_pages]`, see
            `kvstore.index.key_codes.KeyCodes`; empty for rows that a descent finds.
        ranks: Ranks of the positions, and of those that a rotation adds, float32, see
            `workers.retrieval.sampling.Ranks`.
        count: Rows per KV head that are drawn at most, 1 or more.
        summaries: Of the keys, which a descent goes through; None where every row is scored.
        seen: Of a session behind the model's window: how its queries see the rows.
        turned: Theirs to each segment of rows, scaled, contiguous float32 `[segments, n_kv_heads, group,
            head_dim]`; None: all rows are asked alike.
    """

    rows: PagedRows
    layer: int
    codes: Tensor
    ranks: Tensor
    count: int
    summaries: Summaries | None = None
    seen: SeenRows | None = None
    turned: Tensor | None = None

    @property
    def scored(self) -> int:
        """Nodes and rows that a search scores in each head, about."""
        rows = self.rows.length
        if self.summaries is None:
            return rows
        top = self.summaries.top
        return int(min(rows, rows // FANOUT**top + top * FANOUT * self.summaries.nodes))

    def asked_by(self, queries: Tensor, scale: float, seen: SeenRows) -> "SearchedRows":
        """Let the rows be asked from behind the model's window; queries: `[n_kv_heads, group, head_dim]`."""
        turned = seen.turn_queries(self.layer, queries.float() * scale).contiguous()
        return replace(self, seen=seen, turned=turned)
