"""A session's rows in host memory, and for retrieval codes of its keys, or an index over each layer's."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from kvrecall.domain.page_ids import PageId
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from kvstore.index.base import KeyIndex
from kvstore.index.key_codes import KeyCodes, SharedCodes, code_bytes
from kvstore.index.paged_rows import PagedRows
from kvstore.index.summaries import FANOUT, KeySummaries
from workers.native.attention import NativeAttention
from workers.retrieval.indexes import create_index, index_bytes

# Pages whose keys are encoded before others run.
_PAGES_AT_ONCE = 16


class HostCopy:
    """A session's rows in host memory: for its retrieval, prompts, repairs and re-selections.

    Attributes:
        layout: Shape of the rows.
        rows: The rows, in pages that other sessions and the RAM tier may have too.
        codes: Of the keys, where a search scores every row; of the pages that `index_rows` came to.
        native: Native code that draws and gathers; None: torch does.
        taken: Pages that were taken so far, those that were dropped again included.
    """

    def __init__(
        self,
        layout: PageLayout,
        settings: Retrieval | None,
        native: NativeAttention | None = None,
        shared_codes: SharedCodes | None = None,
    ) -> None:
        """Begin without rows; settings: of the index; None: there is none, however many rows.

        shared_codes: of other sessions.
        """
        self.layout = layout
        self.rows = PagedRows(layout)
        # Native code for keys in these numbers; None: torch reads them.
        self._reader = native if native is not None and layout.dtype in native.dtypes else None
        encode = None if self._reader is None else self._reader.encode_keys
        self.codes = KeyCodes(layout, shared_codes or SharedCodes(), encode)
        self.native = native
        self.taken = 0
        self._settings = settings
        self._ids: list[PageId | None] = []
        self._indexes: list[KeyIndex | KeySummaries | None] = [None] * layout.n_layers
        self._described: Tensor | None = None
        self._searched_by_torch = settings is not None and self._reader is None
        self._joined = dict[int, tuple[Tensor, Tensor]]()

    @property
    def nbytes(self) -> int:
        """Bytes of memory on the host, of pages and codes that others have too included."""
        return self.rows.nbytes + self.codes.nbytes + self.own_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes beside the pages and their codes: of the indexes, and of what is joined for torch."""
        indexes = sum(each.nbytes for each in self._indexes if each is not None)
        joined = (self.layout.parts * keys.nbytes for keys, _ in self._joined.values())
        return indexes + self.codes.joined_bytes + sum(joined)

    @property
    def pages(self) -> int:
        """Pages that it has."""
        return len(self._ids)

    def most_own_bytes(self, length: int) -> int:
        """Most bytes beside the pages of so many rows, and their codes."""
        if self._settings is None:
            return 0
        joined = self.layout.row_bytes * length * self._searched_by_torch
        pages = -(-length // self.layout.page_tokens)
        if self._searched_by_torch and self.codes_keys(length):
            joined += pages * code_bytes(self.layout) * torch.float32.itemsize
        return index_bytes(self._settings, self.layout, length) + joined

    def codes_keys(self, length: int) -> bool:
        """True if a search of so many rows scores all of them, by codes of the keys.

        What is taken for its weight alone, and not by chance, is scored by the keys themselves.
        """
        return (
            self._settings is not None
            and self._draws
            and create_index(self._settings, length) is None
        )

    def keep(self, ids: Sequence[PageId | None], length: int) -> None:
        """Keep the pages that have these ids, up to the first one that has not, or may change (None).

        length: rows of the session.
        """
        kept = _count_alike(self._ids, ids)
        self.truncate(kept * self.layout.page_tokens)
        # Pages that do not change are whole, however many rows the session had.
        self.rows.length = min(kept * self.layout.page_tokens, length)

    def append(self, ids: Sequence[PageId | None], pages: Sequence[Tensor], length: int) -> None:
        """Add pages that follow, up to position `length`: see `PagedRows`.

        They are searched from the next `index_rows` on.
        """
        self._joined.clear()
        self._described = None
        self._ids.extend(ids)
        self.rows.append(pages, length)
        self.taken += len(pages)

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on."""
        self._joined.clear()
        self.rows.truncate(length)
        del self._ids[len(self.rows.pages) :]
        self.codes.truncate(len(self._ids))
        for index in self._indexes:
            if index is not None:
                index.truncate(self.rows.length)

    def index_rows(self) -> Iterator[None]:
        """Encode the keys, or index them, if the settings say so for so many rows; yields in between."""
        if self._settings is None:
            return
        if create_index(self._settings, self.rows.length) is None:
            self._indexes = [None] * self.layout.n_layers
            if self.codes_keys(self.rows.length):
                yield from self._encode()
            return
        for layer in range(len(self._indexes)):
            index = self._indexes[layer] or create_index(self._settings, self.rows.length)
            assert index is not None, "of so many rows"
            if isinstance(index, KeySummaries):
                self._summarise(index, layer)
            else:
                index.extend(self.keys(layer))
            self._indexes[layer] = index
            yield None
        summaries = [each for each in self._indexes if isinstance(each, KeySummaries)]
        if summaries:
            self._described = torch.stack([each.describe() for each in summaries])

    def keys(self, layer: int) -> Tensor:
        """Join a layer's keys, `[n_kv_heads, n, head_dim]`."""
        return self._join(layer)[0] if self._searched_by_torch else self.rows.keys(layer)

    def scored_codes(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Codes of a layer's keys `[n_kv_heads, n, head_dim]`, and their scales `[n_kv_heads, n]`.

        None where a search scores the keys themselves.
        """
        if not self.is_coded:
            return None
        codes, scales = self.codes.join(layer)
        return codes[:, : self.rows.length], scales[:, : self.rows.length]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values `[n_kv_heads, m, head_dim]` of positions, int64 `[n_kv_heads, m]`.

        Any row of a position that is none, -1.
        """
        if self.native is not None:
            keys = self.gather_keys(layer, positions)
            if self.layout.latent:
                return keys, keys
            places = positions.clamp(min=0)
            return keys, self.native.gather(self.rows, layer, places, values=True)
        if not self._searched_by_torch:
            return self.rows.gather(layer, positions)
        keys, values = self._join(layer)
        selected = _select(keys, positions)
        return selected, selected if self.layout.latent else _select(values, positions)

    def gather_keys(self, layer: int, positions: Tensor) -> Tensor:
        """Gather keys `[n_kv_heads, m, head_dim]` of positions, int64 `[n_kv_heads, m]`.

        Of a position that is none, or behind the rows, those of any row.
        """
        places = positions.clamp(0, self.rows.length - 1)
        if self.native is not None:
            return self.native.gather(self.rows, layer, places)
        return self.gather(layer, places)[0]

    def gather_key_runs(self, layer: int, runs: Tensor) -> Tensor:
        """Gather the keys of runs of 8 positions each; run i begins at position `8 * i`.

        runs: int64 `[n_kv_heads, m]`. Returns `[n_kv_heads, 8 * m, head_dim]`, as `gather_keys`.
        """
        positions = runs[..., None] * FANOUT + torch.arange(FANOUT)
        return self.gather_keys(layer, positions.flatten(1))

    @property
    def is_coded(self) -> bool:
        """True if a search scores every row by the codes of the keys: those of all pages are there."""
        # Asked for each layer of a step, so no index is created for the answer.
        return self._draws and self._indexes[0] is None and len(self.codes) == self.pages

    def candidates(self, layer: int, queries: Tensor) -> Tensor | None:
        """Find the rows of a layer that its queries may attend to most, by a tree; None: every row.

        queries: `[n_kv_heads, q, head_dim]` on the host. Returns positions as
        `KeyIndex.candidates`.
        """
        index = self._indexes[layer]
        if index is None or isinstance(index, KeySummaries):
            return None
        return index.candidates(queries.float())

    def summaries(self, layer: int) -> KeySummaries | None:
        """Summaries of a layer's keys; None if a search scores every row, or those of a tree."""
        index = self._indexes[layer]
        return index if isinstance(index, KeySummaries) else None

    @property
    def described_summaries(self) -> Tensor | None:
        """Where the summaries of all layers are, see `Summaries`; None where rows lack some, or the best are taken."""
        return self._described if self._draws else None

    @property
    def _draws(self) -> bool:
        """True if rows are taken by chance: codes may stand for the keys, where all are scored."""
        return self._settings is not None and self._settings.choice == "sample"

    def _summarise(self, summaries: KeySummaries, layer: int) -> None:
        """Summarise the keys of a layer that are not yet."""
        if self._reader is None:
            start = summaries.needed_from
            summaries.extend(self.rows.keys(layer, slice(start, None)), start)
        else:
            fill = partial(self._reader.summarise_keys, self.rows, layer)
            summaries.extend_by(fill, self.layout, self.rows.length)

    def _encode(self) -> Iterator[None]:
        """Encode the keys of the pages that have no codes."""
        while (first := len(self.codes)) < self.pages:
            pages = slice(first, first + _PAGES_AT_ONCE)
            self.codes.append(self._ids[pages], self.rows.pages[pages])
            yield None

    def _join(self, layer: int) -> tuple[Tensor, Tensor]:
        """Join a layer's rows for torch, which reads them with each step, and keep them."""
        if layer not in self._joined:
            self._joined[layer] = self.rows.rows(layer)
        return self._joined[layer]


def _select(rows: Tensor, positions: Tensor) -> Tensor:
    """Select positions, int64 `[heads, m]`, of rows `[heads, n, head_dim]`; the first one for -1."""
    heads, n, head_dim = rows.shape
    first = n * torch.arange(heads)[:, None]
    indices = (first + positions.clamp(min=0)).flatten()
    return rows.view(-1, head_dim).index_select(0, indices).view(heads, -1, head_dim)


def _count_alike(mine: list[PageId | None], wanted: Sequence[PageId | None]) -> int:
    """Count the first pages that are the wanted ones, and do not change."""
    if None not in mine and mine == list(wanted[: len(mine)]):
        return len(mine)  # as nearly always, without a look at each page
    pairs = zip(mine, wanted, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] is not None and pair[0] == pair[1], pairs))
