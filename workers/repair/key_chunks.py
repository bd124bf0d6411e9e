"""Chunks of a session's stored keys: memory does not grow with the session."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvstore.store import RowStore

# Tokens whose keys are on the device at once: enough to be worth a transfer and a multiplication.
CHUNK_ROWS = 1024


def read_key_chunks(
    store: RowStore, name: str, length: int, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Read the session's first `length` keys in order, in chunks of about `CHUNK_ROWS` tokens.

    Yields the chunk's first position and its keys, `[n_layers, n_kv_heads, rows, head_dim]`. Raises
    the errors of the store.
    """
    first = 0
    pages = list[Tensor]()
    rows = 0
    for start, keys in store.scan_keys(name, 0, length):
        if not pages:
            first = start
        pages.append(keys)
        rows += keys.shape[2]
        if rows >= CHUNK_ROWS:
            yield first, torch.cat(pages, dim=2).to(device)
            pages = []
            rows = 0
    if pages:
        yield first, torch.cat(pages, dim=2).to(device)
