"""Sources of a session's keys: its stored pages, or the copy of its rows in host memory."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvstore.format.gather import ReadKeys
from kvstore.format.page import PageLayout
from workers.cache.transfers import Transfers
from workers.generation.host_copy import PageTaker
from workers.positions.seen_rows import SeenRows
from workers.retrieval.host_copy import HostCopy


class PageSource(Protocol):
    """A source of a session's pages: `kvstore.store.RowStore`, or one with the same methods."""

    @property
    def layout(self) -> PageLayout:
        """Shape of a page."""
        ...

    def read_keys(self, session: str, pages: Sequence[int]) -> ReadKeys:
        """Read the keys of pages by index."""
        ...


class KeySource(Protocol):
    """The keys of a session's first `length` tokens, read in chunks of whole pages.

    Attributes:
        length: Number of tokens.
        page_tokens: Tokens of a page.
    """

    length: int
    page_tokens: int

    @property
    def bytes_read(self) -> int:
        """Bytes of stored rows, keys and values, that were read so far."""
        ...

    def read(self, rows: slice) -> Sequence[Tensor]:
        """Read consecutive rows, which begin with a page.

        Returns per layer `[n_kv_heads, rows, head_dim]` on the device. Raises the errors of the
        store.
        """
        ...


class StoredKeys:
    """Keys in the pages of the row store, each read as often as it is asked for."""

    def __init__(self, store: PageSource, name: str, length: int, transfers: Transfers) -> None:
        """Address the pages of session `name`; nothing is read."""
        self.length = length
        self.page_tokens = store.layout.page_tokens
        self.bytes_read = 0
        self._store = store
        self._name = name
        self._transfers = transfers

    def read(self, rows: slice) -> Sequence[Tensor]:
        """Read the pages of the rows from the tiers."""
        pages = range(rows.start // self.page_tokens, -(-rows.stop // self.page_tokens))
        found = self._store.read_keys(self._name, pages)
        self.bytes_read += found.bytes_read
        joined = torch.cat(found.keys, dim=2)[:, :, : rows.stop - rows.start]
        (keys,) = self._transfers.to_device([joined])
        return list(keys)


class CopiedKeys:
    """Keys in the copy of the session's rows in host memory.

    Pages that the copy does not have yet are taken when they are first read.
    """

    def __init__(self, copy: HostCopy, taker: PageTaker, transfers: Transfers) -> None:
        """Read the session's rows from its copy; nothing is taken yet."""
        self.length = taker.length
        self.page_tokens = copy.layout.page_tokens
        self.bytes_read = 0
        self._copy = copy
        self._taker = taker
        self._transfers = transfers

    def read(self, rows: slice) -> Sequence[Tensor]:
        """Read the rows from the copy."""
        copy = self._copy
        before = copy.taken
        self._taker.take(rows.stop)
        self.bytes_read += (copy.taken - before) * self.page_tokens * copy.layout.token_bytes
        (keys,) = self._transfers.to_device([copy.rows.all_keys(rows)])
        return list(keys)


class SeenKeys:
    """Keys of another source, turned to where the session's next pass sees them.

    So many queries are compared with them that turning the keys is the lesser work.
    """

    def __init__(self, keys: KeySource, seen: SeenRows) -> None:
        """Turn the keys of a source."""
        self.length = keys.length
        self.page_tokens = keys.page_tokens
        self._keys = keys
        self._seen = seen

    @property
    def bytes_read(self) -> int:
        """Bytes of stored rows that were read so far."""
        return self._keys.bytes_read

    def read(self, rows: slice) -> Sequence[Tensor]:
        """Read and turn the rows."""
        return [
            self._seen.turn_run(layer, keys, rows.start)
            for layer, keys in enumerate(self._keys.read(rows))
        ]
