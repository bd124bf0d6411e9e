"""Changes of a session's active rows to a selection: only rows that are not active yet are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvrecall.domain.page_ids import PageId
from workers.cache.active_cache import EMPTY, ActiveCache
from workers.engine.session import ResidentSession
from workers.primitives.selection import gather_or_empty, is_among, mask_to_indices


class RowSource(Protocol):
    """A source of a session's rows: `kvstore.store.RowStore`, or one with the same method."""

    def gather_selection(
        self, session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Read per layer int64 `[n_kv_heads, m]`: keys and values `[n_kv_heads, m, head_dim]`."""
        ...


class LayerSource(RowSource, Protocol):
    """A source that single layers and whole pages can be read from as well."""

    def gather_heads(self, session: str, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Read positions of one layer, as `gather_selection`."""
        ...

    def page_ids(self, session: str, pages: Sequence[int]) -> list[PageId | None]:
        """Ids of pages, None for those that may change; reads nothing."""
        ...

    def hold_pages(self, session: str, pages: Sequence[int]) -> list[Tensor]:
        """Read pages to be kept, `[page_layers, parts, n_kv_heads, page_tokens, head_dim]`."""
        ...


@dataclass(frozen=True, eq=False)
class RowMoves:
    """What a change of the active rows moved; rows are counted over all layers and KV heads.

    Attributes:
        rows_in: Rows that were read and became active.
        rows_kept: Rows that stayed active.
        evicted: Positions of the rows that left, per layer int64 `[n_kv_heads, m]`, -1 for none.
    """

    rows_in: int
    rows_kept: int
    evicted: tuple[Tensor, ...]

    @property
    def rows_out(self) -> int:
        """Rows that left the active set; they stay in the row store."""
        return sum(int((positions >= 0).sum()) for positions in self.evicted)


@dataclass(frozen=True)
class _LayerChange:
    """One layer's change: a mask of its rows, and positions, int64 `[n_kv_heads, m]`, -1 for none."""

    keep: Tensor
    load: Tensor
    evicted: Tensor


def become(
    cache: ActiveCache, source: RowSource, resident: ResidentSession, wanted: Sequence[Tensor]
) -> RowMoves:
    """Make a selection active: of every layer the `wanted` rows, and no others.

    wanted: int64 positions per layer, `[n_kv_heads, m]`, each head's ascending with -1 at the end
    for none; each row is in the source. All rows are read first, so that a failed read leaves the
    session as it was; then each layer evicts before it inserts, and never holds more rows than in
    one of both selections. Rows that stay keep their marks and sums; new ones are not promoted.

    Raises the errors of `source`; then nothing has changed.
    """
    slot = resident.slot
    changes = [
        _plan_layer(cache.read(slot, layer).positions.cpu(), positions.cpu())
        for layer, positions in enumerate(wanted)
    ]
    loaded = source.gather_selection(resident.session.name, [change.load for change in changes])
    for layer, (change, (keys, values)) in enumerate(zip(changes, loaded, strict=True)):
        if not change.evicted.numel() and not change.load.numel():
            continue
        positions = change.load.masked_fill(change.load < 0, EMPTY).to(torch.int32)
        promoted = torch.zeros_like(positions, dtype=torch.bool)
        cache.insert(
            slot, layer, positions, keys, values, promoted, keep=change.keep.to(cache.device)
        )
    return RowMoves(
        rows_in=sum(int((change.load >= 0).sum()) for change in changes),
        rows_kept=sum(int(change.keep.sum()) for change in changes),
        evicted=tuple(change.evicted for change in changes),
    )


def _plan_layer(active: Tensor, wanted: Tensor) -> _LayerChange:
    """Compare the active positions, int32 `[n_kv_heads, n]`, with those that are wanted."""
    positions = active.long()
    selected = wanted.masked_fill(wanted < 0, EMPTY)
    stays = is_among(positions, selected)
    leaves = mask_to_indices((positions != EMPTY) & ~stays)
    absent = mask_to_indices((selected != EMPTY) & ~is_among(selected, positions))
    return _LayerChange(
        keep=stays,
        load=_gather(selected, absent),
        evicted=_gather(positions, leaves),
    )


def _gather(positions: Tensor, indices: Tensor) -> Tensor:
    """Positions int64 at indices, -1 where there is none."""
    found = gather_or_empty(positions, indices)
    return found.masked_fill(found == EMPTY, -1)
