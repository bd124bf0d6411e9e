"""A prefilled block's queries, and the rows of one layer that they attend to."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY

# Consecutive queries that attend to the same rows: what one of them wants, all of them compute.
TILE = 64


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Queries of consecutive new tokens over a layer's rows, the tokens' own included.

    Attributes:
        queries: After RoPE, `[n_heads, t, head_dim]`.
        keys: After RoPE, `[n_kv_heads, n, head_dim]`.
        values: `[n_kv_heads, n, head_dim]`.
        positions: True positions of the rows, int `[n_kv_heads, n]`, `EMPTY` where there is none.
        first: Position of the first query.
        scale: Factor of the attention logits.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    first: int
    scale: float

    @property
    def tokens(self) -> int:
        """Queries."""
        return self.queries.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @property
    def end(self) -> int:
        """Position after the last query; distances are smaller."""
        return self.first + self.tokens

    @property
    def query_positions(self) -> Tensor:
        """Positions of the queries, int64 `[t]`."""
        return torch.arange(self.first, self.end, device=self.positions.device)

    def heads(self, start: int, stop: int) -> "BlockRows":
        """The same for the KV heads `start` to `stop` - 1 alone."""
        return BlockRows(
            self.queries[start * self.group : stop * self.group],
            self.keys[start:stop],
            self.values[start:stop],
            self.positions[start:stop],
            self.first,
            self.scale,
        )

    def part(self, start: int, stop: int) -> "BlockRows":
        """The same for the queries `start` to `stop` - 1 alone."""
        queries = self.queries[:, start:stop]
        return replace(self, queries=queries, first=self.first + start)

    def always(self, sinks: int) -> Tensor:
        """Rows that every query attends to where it may, bool `[n_kv_heads, n]`.

        The tokens before position `sinks` and the block's own.
        """
        resident = self.positions != EMPTY
        return resident & ((self.positions < sinks) | (self.positions >= self.first))

    def weights(self, drawn: Tensor) -> Tensor:
        """Attention weights of the queries at `drawn`, int64 `[s]`: float32 `[n_heads, s, n]`.

        Zero at rows after the query and where there is no row.
        """
        n_kv_heads, n, head_dim = self.keys.shape
        queries = self.queries[:, drawn].float().reshape(n_kv_heads, -1, head_dim) * self.scale
        logits = (queries @ self.keys.float().transpose(1, 2)).view(n_kv_heads, self.group, -1, n)
        hidden = self.positions[:, None, None] > (self.first + drawn)[:, None]
        return logits.masked_fill_(hidden, -torch.inf).softmax(-1).flatten(0, 1)
