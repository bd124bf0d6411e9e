"""Attention weights of the queries that share a KV head."""

import torch
from torch import Tensor


def weigh(queries: Tensor, keys: Tensor, raised: Tensor | None = None) -> Tensor:
    """Weigh keys by their share of the softmax, the mean over a KV head's queries.

    queries: `[n_kv_heads, group, d]`, scaled; keys: `[n_kv_heads, n, d]`; raised: what a key's
    logits are raised by, float32 `[n_kv_heads, n]`; -inf for none, which has no weight. Returns
    float32 `[n_kv_heads, n]`.
    """
    queries = queries.to(keys.dtype)
    if keys.dtype == torch.float32:
        # For few queries torch reads keys at memory's speed if they come first.
        logits = (keys @ queries.mT).mT
    else:
        # In one product of all heads torch copies keys of 16 bits, which takes longer than it.
        products = [each @ rows.mT for each, rows in zip(queries, keys, strict=True)]
        logits = torch.stack(products).float()
    if raised is not None:
        logits = logits + raised[:, None]
    return logits.softmax(-1).mean(1)
