"""Attention logits as a model defines them, and attention of grouped queries over rows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Logits:
    """How a layer's attention logits come from queries and keys.

    Attributes:
        scale: Factor of the product of a query and a key.
        softcap: Bound that tanh limits the scaled product to; None: there is none.
        sinks: One more logit per query head, float `[n_heads]`, which takes its part of the softmax and
            adds no value (gpt-oss); None: there are none.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if logits are scaled products and nothing else."""
        return self.softcap is None and self.sinks is None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, logits: Logits
) -> Tensor:
    """Attend with the queries of each KV head's group to its rows.

    query: `[B, n_kv_heads, group * t, d]`, the group's first query head first; key: `[B, n_kv_heads, n,
    d]`; value: `[B, n_kv_heads, n, d_value]`. mask: added to the logits, after the soft cap,
    broadcast to `[B, n_kv_heads, group * t, n]`; None: nothing. Returns `[B, n_kv_heads, group * t,
    d_value]`.
    """
    if logits.softcap is None:
        if logits.sinks is not None:
            # A row of zeros whose logit is the sink's.
            sinks = _spread_sinks(logits.sinks, query)
            shape = (*query.shape[:3], key.shape[2])
            before = query.new_zeros(shape) if mask is None else mask.expand(shape)
            mask = torch.cat([before, sinks], 3)
            key, value = (nn.functional.pad(rows, (0, 0, 0, 1)) for rows in (key, value))
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=logits.scale
        )
    product = (query.float() @ key.float().mT) * logits.scale
    product = torch.tanh(product / logits.softcap) * logits.softcap
    if mask is not None:
        product = product + mask
    if logits.sinks is not None:
        product = torch.cat([product, _spread_sinks(logits.sinks, query).float()], -1)
    weights = product.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _spread_sinks(sinks: Tensor, query: Tensor) -> Tensor:
    """Spread the sinks of query heads over their queries, `[B, n_kv_heads, group * t, 1]`."""
    batch, heads, asked, _ = query.shape
    per_head = sinks.detach().to(query.dtype).view(heads, -1, 1)
    spread = per_head.expand(-1, -1, asked // per_head.shape[1]).reshape(1, heads, asked, 1)
    return spread.expand(batch, -1, -1, -1)
