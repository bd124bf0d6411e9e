"""Attention weights of the queries that share a KV head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.index.key_codes import encode_queries
from workers.primitives.products import cpu_has_bfloat16


def weigh(queries: Tensor, keys: Tensor, raised: Tensor | None = None) -> Tensor:
    """Weigh keys by their share of the softmax, the mean over a KV head's queries.

    queries: `[n_kv_heads, group, d]`, scaled; keys: `[n_kv_heads, n, d]`; raised: what a key's
    logits are raised by, float32 `[n_kv_heads, n]`; -inf for none, which has no weight. Returns
    float32 `[n_kv_heads, n]`.
    """
    return _share(_compare(queries, keys), raised)


def weigh_codes(queries: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Weigh keys by their codes `[n_kv_heads, n, d]`, each times its scale `[n_kv_heads, n]`, as `weigh`."""
    return _share(_compare_codes(queries, codes, scales))


def weigh_runs(asked: Tensor, keys: Tensor, sizes: Sequence[int]) -> Tensor:
    """Weigh keys that are runs of so many, each of which is asked by queries of its own, as `weigh`.

    asked: `[runs, n_kv_heads, group, d]`, scaled.
    """
    runs = zip(asked, torch.split(keys, list(sizes), 1), strict=True)
    logits = [_compare(queries, run) for queries, run in runs if run.shape[1]]
    return _share(torch.cat(logits, -1))


def weigh_code_runs(asked: Tensor, codes: Tensor, scales: Tensor, sizes: Sequence[int]) -> Tensor:
    """Weigh keys by their codes, as `weigh_codes`, that are runs as those of `weigh_runs`."""
    parts = (torch.split(each, list(sizes), 1) for each in (codes, scales))
    runs = zip(asked, *parts, strict=True)
    logits = [_compare_codes(*run) for run in runs if run[1].shape[1]]
    return _share(torch.cat(logits, -1))


def weigh_kinds(asked: Tensor, keys: Tensor, kinds: Tensor, raised: Tensor | None = None) -> Tensor:
    """Weigh keys of several kinds, each of which is asked by queries of its own, as `weigh`.

    asked: `[n, n_kv_heads, group, d]`, scaled; kinds: int64 `[n_kv_heads, m]`, or `[m]` alike in all heads.
    """
    logits = _compare(asked[0], keys)
    for kind in range(1, len(asked)):
        of_kind = (kinds == kind).expand(len(keys), -1)[:, None]
        logits = torch.where(of_kind, _compare(asked[kind], keys), logits)
    return _share(logits, raised)


def _share(logits: Tensor, raised: Tensor | None = None) -> Tensor:
    """Shares of the softmax of logits `[n_kv_heads, group, n]`, the mean over the group."""
    if raised is not None:
        logits = logits + raised[:, None]
    return logits.softmax(-1).mean(1)


def _compare_codes(queries: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Logits of keys for scaled queries by their codes, float32 `[n_kv_heads, group, n]`."""
    asked, asked_scales = encode_queries(queries.float())
    # Whole numbers, and exact as such in float32.
    products = (codes @ asked.mT).mT
    return products * scales[:, None] * asked_scales[..., None]


def _compare(queries: Tensor, keys: Tensor) -> Tensor:
    """Logits of keys for scaled queries, float32 `[n_kv_heads, group, n]`."""
    if keys.dtype == torch.float32:
        # For few queries torch reads keys at memory's speed if they come first.
        return (keys @ queries.float().mT).mT
    if keys.dtype == torch.bfloat16 and cpu_has_bfloat16():
        # In one product of all heads torch copies keys of 16 bits, which takes longer than it.
        pairs = zip(queries.to(keys.dtype), keys, strict=True)
        return torch.stack([each @ rows.mT for each, rows in pairs]).float()
    # Without instructions for such numbers a product takes longer than a copy in float32.
    pairs = zip(queries.float(), keys, strict=True)
    return torch.stack([(rows.float() @ each.mT).mT for each, rows in pairs])
