"""Blocks of random and of planted attention, with full caches and with gaps."""

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.prefill.block_rows import BlockRows


def build_block(
    seed: int = 0,
    *,
    old: int = 200,
    tokens: int = 96,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    kept: float = 1.0,
    uneven: bool = False,
    columns: int = 0,
    sharpness: float = 1.0,
) -> BlockRows:
    """A block of `tokens` queries after `old` tokens, of which each head keeps the share `kept`.

    `columns` rows of each head attract all queries. With `uneven` each head has fewer rows than the
    one before, and EMPTY positions behind them.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    queries = normal(kv_heads * group, tokens, head_dim) * sharpness
    keys, values, positions = [], [], []
    for head in range(kv_heads):
        count = max(1, round(old * kept)) - (7 * head if uneven else 0)
        chosen = torch.randperm(old, generator=random)[:count].sort().values
        at = torch.cat([chosen, torch.arange(old, old + tokens)])
        head_keys = normal(len(at), head_dim)
        if columns:
            direction = torch.nn.functional.normalize(normal(head_dim), dim=0) * 12
            attracted = torch.randperm(count, generator=random)[:columns]
            head_keys[attracted] += direction
            queries[head * group : (head + 1) * group] += direction / 3
        keys.append(head_keys)
        values.append(normal(len(at), head_dim))
        positions.append(at)
    width = max(map(len, positions))
    pad = torch.nn.functional.pad
    return BlockRows(
        queries,
        torch.stack([pad(each, (0, 0, 0, width - len(each))) for each in keys]),
        torch.stack([pad(each, (0, 0, 0, width - len(each))) for each in values]),
        torch.stack([pad(each, (0, width - len(each)), value=EMPTY) for each in positions]).int(),
        old,
        head_dim**-0.5,
    )


def dense_weights(rows: BlockRows) -> Tensor:
    """Exact attention weights of all queries, float32 `[n_heads, t, n]`."""
    keys = rows.keys.repeat_interleave(rows.group, 0)
    logits = rows.queries @ keys.transpose(1, 2) * rows.scale
    hidden = rows.positions[:, None] > rows.query_positions[:, None]
    return logits.masked_fill(hidden.repeat_interleave(rows.group, 0), -torch.inf).softmax(-1)


def dense_output(rows: BlockRows, cells: Tensor | None = None) -> Tensor:
    """Exact attention, or a softmax over `cells` alone, bool `[n_kv_heads, t, n]`."""
    weights = dense_weights(rows)
    if cells is not None:
        weights = weights * cells.repeat_interleave(rows.group, 0)
        weights = weights / weights.sum(-1, keepdim=True)
    return weights @ rows.values.repeat_interleave(rows.group, 0)
