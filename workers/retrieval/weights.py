"""Attention weights of the queries that share a KV head."""

import torch
from torch import Tensor

from workers.primitives.products import cpu_has_bfloat16


def weigh(queries: Tensor, keys: Tensor, raised: Tensor | None = None) -> Tensor:
    """Weigh keys by their share of the softmax, the mean over a KV head's queries.

    queries: `[n_kv_heads, group, d]`, scaled; keys: `[n_kv_heads, n, d]`; raised: what a key's
    logits are raised by, float32 `[n_kv_heads, n]`; -inf for none, which has no weight. Returns
    float32 `[n_kv_heads, n]`.
    """
    if keys.dtype == torch.float32:
        # For few queries torch reads keys at memory's speed if they come first.
        logits = (keys @ queries.float().mT).mT
    elif keys.dtype == torch.bfloat16 and cpu_has_bfloat16():
        # In one product of all heads torch copies keys of 16 bits, which takes longer than it.
        pairs = zip(queries.to(keys.dtype), keys, strict=True)
        logits = torch.stack([each @ rows.mT for each, rows in pairs]).float()
    else:
        # Without instructions for such numbers a product takes longer than a copy in float32.
        pairs = zip(queries.float(), keys, strict=True)
        logits = torch.stack([(rows.float() @ each.mT).mT for each, rows in pairs])
    if raised is not None:
        logits = logits + raised[:, None]
    return logits.softmax(-1).mean(1)
