"""Whether a layer could retrieve the rows that the layer below it found (IceCache, appendix C)."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.key_index.keys import KeySet
from benchmarks.key_index.measure import TOP
from kvrecall.reporting.results import Row, bootstrap, quality_row


def measure_reuse(keys: KeySet, seed: int) -> Iterator[Row]:
    """Rows of each layer and the next: what their best rows share, and hold of the attention.

    keys: of adjacent layers, in their order. The best rows of a KV head are the 64 to which the
    queries of its group attend most, together.
    """
    weights = [group_weights(*layer) for layer in zip(keys.keys, keys.queries, strict=True)]
    best = [each.topk(TOP, dim=-1).indices for each in weights]
    overlaps, kept = [], []
    for (found, own), (_, attended) in zip(pairwise(best), pairwise(weights), strict=True):
        marks = torch.zeros_like(attended, dtype=torch.bool).scatter_(-1, found, True)
        overlaps.append(marks.gather(-1, own).float().mean(-1))
        kept.append(attended.gather(-1, found).sum(-1) / attended.gather(-1, own).sum(-1))
    metrics = {
        f"share of the {TOP} best rows that the layer below has too": overlaps,
        "attention that the rows of the layer below hold, of that which its own do": kept,
    }
    for metric, pairs in metrics.items():
        yield _row(keys, "all layers", metric, torch.stack(pairs), seed)
        means = torch.stack([each.mean() for each in pairs])
        highest = int(means.argmax())
        yield _row(keys, f"the best layer, {highest + 1}", metric, pairs[highest], seed)


def group_weights(keys: Tensor, queries: Tensor) -> Tensor:
    """Attention of each token's groups: `[tokens, n_kv_heads, n]`, the mean over a group's queries.

    keys `[n_kv_heads, n, d]`; queries `[tokens, n_kv_heads, group, d]`.
    """
    logits: Tensor = queries @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5
    return logits.softmax(-1).mean(2)


def _row(keys: KeySet, layers: str, metric: str, values: Tensor, seed: int) -> Row:
    estimate = bootstrap(values.flatten().tolist(), seed, draws=200)
    assert estimate, "a set of keys has queries"
    condition = f"{keys.name}, {keys.rows} rows: {layers}"
    return quality_row(condition, estimate, metric=metric, rows=keys.rows)
