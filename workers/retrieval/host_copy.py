"""A copy of a session's rows in host memory, and for retrieval an index over each layer's keys."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from kvstore.index.arena import RowArena
from kvstore.index.base import KeyIndex
from kvstore.index.summaries import KeySummaries
from workers.retrieval.indexes import create_index, index_bytes


class HostCopy:
    """One copy of a session's rows: for its retrieval, prompts, repairs and re-selections.

    Attributes:
        layout: Shape of the rows.
        arena: The rows.
        copied: Rows that were copied into it so far, those that were dropped again included.
    """

    def __init__(self, layout: PageLayout, settings: Retrieval | None) -> None:
        """Begin without rows; settings: of the index; None: there is none, however many rows."""
        self.layout = layout
        self.arena = RowArena(layout)
        self.copied = 0
        self._settings = settings
        self._indexes: list[KeyIndex | KeySummaries | None] = [None] * layout.n_layers

    @property
    def nbytes(self) -> int:
        """Bytes of memory on the host."""
        return self.arena.nbytes + sum(each.nbytes for each in self._indexes if each is not None)

    @staticmethod
    def bytes_for(layout: PageLayout, settings: Retrieval | None, length: int) -> int:
        """Most bytes of so many rows per KV head and their indexes."""
        indexes = 0 if settings is None else index_bytes(settings, layout, length)
        return RowArena.bytes_for(layout, length) + indexes

    def append(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Append rows, as `RowArena.append`; they are searched from the next `index_rows` on."""
        self.arena.append(layers)
        self.copied += layers[0][0].shape[1]

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on."""
        self.arena.truncate(length)
        for index in self._indexes:
            if index is not None:
                index.truncate(length)

    def index_rows(self) -> Iterator[None]:
        """Index the arena's rows, if the settings say so for so many; yields after each layer."""
        if self._settings is None:
            return
        for layer in range(len(self._indexes)):
            index = create_index(self._settings, self.arena.length)
            if index is None:
                self._indexes[layer] = None
                continue
            index = self._indexes[layer] or index
            index.extend(self.arena.keys(layer))
            self._indexes[layer] = index
            yield None

    def gather_selection(
        self, _session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Gather positions of all layers, int64 `[n_kv_heads, m]` each, -1 for none.

        A source of this session's rows as the row store is one of all sessions'. Returns per layer
        keys and values `[n_kv_heads, m, head_dim]`, any row where there is none.
        """
        return [self.arena.gather(layer, positions) for layer, positions in enumerate(selection)]

    def is_indexed(self, layer: int) -> bool:
        """True if a search of the layer goes through an index, and not through every row."""
        return self._indexes[layer] is not None

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
