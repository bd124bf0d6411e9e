"""Blocks of queries whose attention has vertical lines, and the dense attention beside them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.prefill.block_rows import BlockRows

# Lengths of the lines' common direction in keys and in queries: the lines hold 0.99 of the weight.
_KEY = 12.0
_QUERY = 6.0


@dataclass(frozen=True)
class Shape:
    """Heads of an attention layer."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        """The shape in words."""
        return f"{self.n_heads} heads over {self.n_kv_heads} of {self.head_dim}"


def plant_block(
    shape: Shape,
    n: int,
    tokens: int,
    share: float,
    seed: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> BlockRows:
    """Random queries of the last `tokens` of `n` positions, and random rows with vertical lines.

    In each KV head the share `share` of the rows, drawn at random, points along a direction that all
    queries of its group have in common.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random)

    group = shape.n_heads // shape.n_kv_heads
    direction = torch.nn.functional.normalize(normal(shape.n_kv_heads, 1, shape.head_dim), dim=-1)
    scale = shape.head_dim**0.5 / 8  # logits as with 64 numbers a head
    queries = normal(shape.n_heads, tokens, shape.head_dim)
    queries += _QUERY * scale * direction.repeat_interleave(group, 0)
    keys = normal(shape.n_kv_heads, n, shape.head_dim)
    for head in range(shape.n_kv_heads):
        lines = torch.randperm(n - tokens, generator=random)[: round(share * n)]
        keys[head, lines] += _KEY * direction[head]
    values = normal(shape.n_kv_heads, n, shape.head_dim)
    positions = torch.arange(n, dtype=torch.int32).expand(shape.n_kv_heads, -1)
    queries, keys, values = (each.to(device, dtype) for each in (queries, keys, values))
    first = n - tokens
    return BlockRows(queries, keys, values, positions.to(device), first, shape.head_dim**-0.5)


class DenseAttention:
    """Attention of a block as a worker computes it without lines; layers share the mask."""

    def __init__(self, rows: BlockRows) -> None:
        """Build the mask."""
        self._rows = rows
        hidden = rows.positions[0] > rows.query_positions.repeat(rows.group)[:, None]
        mask = torch.zeros(hidden.shape, dtype=rows.queries.dtype, device=hidden.device)
        self._mask = mask.masked_fill_(hidden, -torch.inf)

    def __call__(self) -> Tensor:
        """Attend; returns `[n_heads, t, head_dim]`."""
        rows = self._rows
        out = torch.nn.functional.scaled_dot_product_attention(
            rows.queries.reshape(1, len(rows.keys), -1, rows.queries.shape[-1]),
            rows.keys[None],
            rows.values[None],
            attn_mask=self._mask,
            scale=rows.scale,
        )
        return out.view(rows.queries.shape)
