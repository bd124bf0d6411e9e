"""A session's stored keys, chunk by chunk: memory does not grow with the session."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvstore.store import RowStore

CHUNK_ROWS = 1024
"""Tokens whose keys are on the device at once: enough to be worth a transfer and a multiplication."""


def stored_keys(
    store: RowStore, name: str, length: int, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """The session's first `length` keys in order: (first position, `[n_layers, n_kv_heads, rows, head_dim]`).

    Pages are joined into chunks of `CHUNK_ROWS`. Raises what the store raises.
    """
    first = 0
    held = list[Tensor]()
    rows = 0
    for start, keys in store.scan_keys(name, 0, length):
        if not held:
            first = start
        held.append(keys)
        rows += keys.shape[2]
        if rows >= CHUNK_ROWS:
            yield first, torch.cat(held, dim=2).to(device)
            held = []
            rows = 0
    if held:
        yield first, torch.cat(held, dim=2).to(device)
