"""Attention of observed queries over every stored row of a session, in memory that does not grow with it.

The row store is scanned twice: once for the softmax's normaliser over all rows, once for the weights.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvstore.store import RowStore
from workers.observation import Observed

CHUNK_ROWS = 1024
"""Tokens whose keys are on the device at once: enough to be worth a transfer and a multiplication."""


class StoredAttention:
    """The softmax of one observation's queries over all rows of a session: first `add` every row, then `weights`.

    Keys come layer by layer, `[n_kv_heads, rows, head_dim]`: the weights of all layers at once would take gigabytes
    in a large model. Every stored row is taken to be before the queries.
    """

    def __init__(self, observed: Observed, n_kv_heads: int) -> None:
        n_heads, self._tokens, head_dim = observed.queries[0].shape
        self._group = n_heads // n_kv_heads
        self._scale = head_dim**-0.5
        self._queries = [queries.reshape(n_kv_heads, -1, head_dim) for queries in observed.queries]
        nothing = torch.full((n_kv_heads, self._group * self._tokens, 1), -torch.inf, device=self._queries[0].device)
        self._normalisers = [nothing] * len(self._queries)

    def add(self, layer: int, keys: Tensor) -> None:
        """Count rows into the softmax's normaliser."""
        logits = self._logits(layer, keys).logsumexp(-1, keepdim=True)
        self._normalisers[layer] = torch.logaddexp(self._normalisers[layer], logits)

    def weights(self, layer: int, keys: Tensor) -> Tensor:
        """The attention that rows get: float32 `[n_kv_heads, group, t, rows]`, as `scoring.attention` has it."""
        weights = (self._logits(layer, keys) - self._normalisers[layer]).exp_()
        return weights.view(keys.shape[0], self._group, self._tokens, -1)

    def _logits(self, layer: int, keys: Tensor) -> Tensor:
        logits: Tensor = (self._queries[layer].float() * self._scale) @ keys.float().transpose(1, 2)
        return logits


def stored_keys(store: RowStore, name: str, length: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """The session's first `length` keys in order: (first position, `[n_layers, n_kv_heads, rows, head_dim]`).

    Pages are joined into chunks of `CHUNK_ROWS`. Raises what the store raises.
    """
    first, held, rows = 0, list[Tensor](), 0
    for start, keys in store.scan_keys(name, 0, length):
        if not held:
            first = start
        held.append(keys)
        rows += keys.shape[2]
        if rows >= CHUNK_ROWS:
            yield first, torch.cat(held, dim=2).to(device)
            held, rows = [], 0
    if held:
        yield first, torch.cat(held, dim=2).to(device)
