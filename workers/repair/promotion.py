"""Promotion: evicted rows become active again, and active rows are demoted in exchange for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY, ActiveCache
from workers.engine.activation import RowSource
from workers.engine.session import ResidentSession
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.primitives.selection import is_among, mask_to_indices, position_mask


@dataclass(frozen=True)
class RowSwap:
    """Rows to promote and demote, per layer: int64 positions `[n_kv_heads, m]`, -1 as padding."""

    promoted: Sequence[Tensor]
    demoted: Sequence[Tensor] = ()

    def demoted_rows(self, group: Group = Alone()) -> int:
        """Demoted rows per layer and KV head, of all ranks of a group: the mean, rounded up."""
        heads = sum(positions.shape[0] for positions in self.demoted) * group.count
        rows = sum(int((positions >= 0).sum()) for positions in self.demoted)
        return -(-sum(group.gather(rows)) // max(1, heads))


def missing_rows(cache: ActiveCache, slot: int, length: int, *, promoted: bool = False) -> Tensor:
    """Mask of the evicted rows: bool `[n_layers, n_kv_heads, length]`, on the cache's device.

    `promoted`: rows that are active only because a repair promoted them count as evicted.
    """
    shape = cache.shape
    missing = torch.empty(
        shape.n_layers, shape.n_kv_heads, length, dtype=torch.bool, device=cache.device
    )
    for layer in range(shape.n_layers):
        rows = cache.read(slot, layer)
        active = rows.positions.masked_fill(rows.promoted, EMPTY) if promoted else rows.positions
        missing[layer] = ~position_mask(active, length)
    return missing


def expand_to_heads(tokens: Tensor, missing: Tensor) -> list[Tensor]:
    """Expand tokens int64 `[m]` to rows: per layer `[n_kv_heads, m]`, -1 where active."""
    absent = missing[:, :, tokens.to(missing.device)].cpu()
    return [torch.where(absent[layer], tokens, -1) for layer in range(len(missing))]


def pair_rows(
    cache: ActiveCache,
    resident: ResidentSession,
    wanted: Sequence[Tensor],
    utility: Tensor,
    sinks: int,
    recent: int,
) -> RowSwap:
    """Pair wanted rows with the active rows of least utility, as long as theirs is higher.

    Changes nothing yet. utility: of the tokens, float `[length]`. Sinks and the recent window stay.
    The best wanted row replaces the worst active one, the second best the second worst, and so on.
    """
    length = resident.session.length
    by_row = utility.cpu().expand(cache.shape.n_kv_heads, -1)
    promoted = list[Tensor]()
    demoted = list[Tensor]()
    for layer, rows in enumerate(wanted):
        active = cache.read(resident.slot, layer).positions.cpu().long()
        stays = (active < sinks) | (active >= length - recent)
        active_utility = by_row.gather(1, active.clamp(max=length - 1))
        worst = active_utility.masked_fill(stays, torch.inf).sort(dim=1, stable=True)
        wanted_utility = by_row.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, -torch.inf)
        best = wanted_utility.sort(dim=1, descending=True, stable=True)
        pairs = min(best.values.shape[1], worst.values.shape[1])
        swap = best.values[:, :pairs] > worst.values[:, :pairs]
        promoted.append(_sorted_where(swap, rows.gather(1, best.indices[:, :pairs])))
        demoted.append(_sorted_where(swap, active.gather(1, worst.indices[:, :pairs])))
    return RowSwap(promoted, demoted)


def _sorted_where(mask: Tensor, positions: Tensor) -> Tensor:
    return torch.where(mask, positions, -1).sort(dim=1).values


def apply_swap(
    cache: ActiveCache, store: RowSource, resident: ResidentSession, swap: RowSwap, utility: Tensor
) -> None:
    """Promote rows at their true positions and demote others, which get their utility as score.

    Raises the errors of `store`; then nothing has changed.
    """
    session = resident.session
    rows = store.gather_selection(session.name, swap.promoted)
    _demote(cache, resident, swap.demoted, utility)
    for layer, (keys, values) in enumerate(rows):
        present = swap.promoted[layer] >= 0
        positions = torch.where(present, swap.promoted[layer], EMPTY).to(torch.int32)
        cache.insert(resident.slot, layer, positions, keys, values, present)
    session.promoted_rows = len(unique_tokens(swap.promoted, cache.group))


def _demote(
    cache: ActiveCache, resident: ResidentSession, demoted: Sequence[Tensor], utility: Tensor
) -> None:
    tokens = unique_tokens(demoted, cache.group)
    if not len(tokens):
        return
    session = resident.session
    for layer, rows in enumerate(demoted):
        positions = cache.read(resident.slot, layer).positions
        is_demoted = is_among(positions, rows.to(positions.device))
        cache.keep(resident.slot, layer, mask_to_indices((positions != EMPTY) & ~is_demoted))
    session.record_evicted(tokens, utility.cpu()[tokens])


def unique_tokens(rows: Sequence[Tensor], group: Group = Alone()) -> Tensor:
    """The tokens of some rows, of all ranks of a group: int64, ascending, each once."""
    tokens = torch.cat(
        [torch.empty(0, dtype=torch.int64), *(positions.flatten() for positions in rows)]
    )
    unique: Tensor = torch.unique(tokens[tokens >= 0])
    return unique if group.count == 1 else torch.unique(torch.cat(group.gather(unique)))


def demote_promoted(cache: ActiveCache, resident: ResidentSession) -> None:
    """Demote the rows that the last repair promoted: the next one selects again among all."""
    session = resident.session
    if not session.promoted_rows:
        return
    for layer in range(cache.shape.n_layers):
        rows = cache.read(resident.slot, layer)
        stays = (rows.positions != EMPTY) & ~rows.promoted
        cache.keep(resident.slot, layer, mask_to_indices(stays))
    session.promoted_rows = 0
