"""Sessions of a store in tests: pages are named by a hash chain over their rows, as by one over tokens."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from kvstore.format.page import ID_BYTES, PageId
from kvstore.store import RowStore
from kvstore.tiers.redis.tier import RedisTier


def name_pages(rows: Tensor, page_tokens: int, last: PageId = b"") -> list[PageId]:
    """Ids of the whole pages of `rows` `[page_layers, parts, n_kv_heads, t, head_dim]` behind page `last`."""
    ids = list[PageId]()
    for page in rows.split(page_tokens, 3):
        if page.shape[3] == page_tokens:
            content = page.contiguous().view(torch.uint8).numpy().tobytes()
            last = blake2b(last + content, digest_size=ID_BYTES).digest()
            ids.append(last)
    return ids


def append(store: RowStore, session: str, rows: Tensor) -> int:
    """Append rows, and name the pages that they fill; returns the session's length."""
    page_tokens = store.layout.page_tokens
    length = store.length(session)
    whole = length // page_tokens
    last = store.page_ids(session, [whole - 1])[0] if whole else None
    behind = store.gather(session, torch.arange(whole * page_tokens, length))
    ids = name_pages(torch.cat([behind, rows], 3), page_tokens, last or b"")
    return store.append(session, rows, ids)


def write(store: RowStore, session: str, rows: Tensor) -> list[PageId]:
    """Begin a session with these rows, and make its pages durable; returns their ids."""
    store.open(session, [])
    append(store, session, rows)
    assert store.flush(session)
    return name_pages(rows, store.layout.page_tokens)


def get_pages(store: RowStore, session: str) -> list[PageId]:
    """Ids of a session's whole pages."""
    whole = store.length(session) // store.layout.page_tokens
    return [page_id for page_id in store.page_ids(session, range(whole)) if page_id is not None]


def open_session(store: RowStore, session: str, rows: Tensor) -> None:
    """Open a session with the whole pages of these rows."""
    store.open(session, name_pages(rows, store.layout.page_tokens))


def read_all(store: RowStore, session: str) -> Tensor:
    """All rows of a session."""
    return store.gather(session, torch.arange(store.length(session)))


def delete_from_lowest(store: RowStore, pages: Sequence[PageId]) -> None:
    """Delete pages from the lowest tier behind the store's back, at once from Redis too."""
    lowest = store._stack.tiers.lowest
    if isinstance(lowest, RedisTier):
        names = [lowest._keys.page(page_id) for page_id in pages]
        lowest._server.run_pipelined(names, lambda name: ("DEL", name))
    else:
        lowest.delete(list(pages))


def list_stored(store: RowStore, depth: int = -1) -> set[PageId]:
    """Ids of the pages in one tier, by default the lowest."""
    return {header.id for header in store._stack.tiers.warm[depth].stored()}
