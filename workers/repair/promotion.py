"""Rows that come back into a session's active set, and those that leave for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY, ActiveCache
from workers.engine.session import WorkerSession
from workers.primitives.selection import mask_to_indices, position_mask


class RowSource(Protocol):
    """Where a session's rows are read from: `kvstore.store.RowStore`, or what stands in for it."""

    def gather_selection(
        self, session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Per layer int64 `[n_kv_heads, m]`, -1 for none -> keys, values `[n_kv_heads, m, head_dim]`."""
        ...


@dataclass(frozen=True)
class RowSwap:
    """What comes and what leaves, per layer: positions int64 `[n_kv_heads, m]`, -1 for none."""

    promoted: Sequence[Tensor]
    demoted: Sequence[Tensor] = ()

    def demoted_rows(self) -> int:
        """Rows that leave, per layer and KV head, rounded up."""
        heads = sum(positions.shape[0] for positions in self.demoted)
        return -(-sum(int((positions >= 0).sum()) for positions in self.demoted) // max(1, heads))


def missing_rows(cache: ActiveCache, slot: int, length: int, *, promoted: bool = False) -> Tensor:
    """Which rows of a session are evicted: bool `[n_layers, n_kv_heads, length]`, on the cache's device.

    `promoted`: also those that are only there because a repair brought them back.
    """
    shape = cache.shape
    missing = torch.empty(
        shape.n_layers, shape.n_kv_heads, length, dtype=torch.bool, device=cache.device
    )
    for layer in range(shape.n_layers):
        rows = cache.read(slot, layer)
        held = rows.positions.masked_fill(rows.promoted, EMPTY) if promoted else rows.positions
        missing[layer] = ~position_mask(held, length)
    return missing


def whole(positions: Tensor, missing: Tensor) -> list[Tensor]:
    """Tokens int64 `[m]` as rows: per layer `[n_kv_heads, m]`, -1 in heads that do not miss them."""
    absent = missing[:, :, positions.to(missing.device)].cpu()
    return [torch.where(absent[layer], positions, -1) for layer in range(len(missing))]


def best_of_heads(worth: Tensor, missing: Tensor, count: int) -> list[Tensor]:
    """The `count` rows worth most of what each layer and KV head misses, as `whole` gives rows.

    worth: float `[n_layers, n_kv_heads, length]`; missing: bool of the same shape.
    """
    count = min(count, missing.shape[-1])
    best = worth.masked_fill(~missing, -torch.inf).topk(count, dim=-1)
    return list(torch.where(best.values == -torch.inf, -1, best.indices).sort(dim=-1).values.cpu())


def exchange(
    cache: ActiveCache,
    session: WorkerSession,
    wanted: Sequence[Tensor],
    worth: Tensor,
    sinks: int,
    recent: int,
) -> RowSwap:
    """Pair what is wanted with the active rows worth least, as long as it is worth more; nothing changes yet.

    worth: float `[length]`, or `[n_layers, n_kv_heads, length]`. Sinks and the recent window stay. The best wanted row
    takes the place of the least active one, the second best that of the second least, and so on.
    """
    assert session.slot is not None, "only a session in a slot is repaired"
    promoted = list[Tensor]()
    demoted = list[Tensor]()
    for layer, rows in enumerate(wanted):
        of_layer = worth.expand(cache.shape.n_layers, cache.shape.n_kv_heads, -1)[layer].cpu()
        held = cache.read(session.slot, layer).positions.cpu().long()
        stays = (held < sinks) | (held >= session.length - recent)
        leaving = of_layer.gather(1, held.clamp(max=session.length - 1)).masked_fill(
            stays, torch.inf
        )
        coming = of_layer.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, -torch.inf)
        best = coming.sort(dim=1, descending=True, stable=True)
        worst = leaving.sort(dim=1, stable=True)
        pairs = min(best.values.shape[1], worst.values.shape[1])
        pays = best.values[:, :pairs] > worst.values[:, :pairs]
        promoted.append(
            torch.where(pays, rows.gather(1, best.indices[:, :pairs]), -1).sort(dim=1).values
        )
        demoted.append(
            torch.where(pays, held.gather(1, worst.indices[:, :pairs]), -1).sort(dim=1).values
        )
    return RowSwap(promoted, demoted)


def move(
    cache: ActiveCache, store: RowSource, session: WorkerSession, change: RowSwap, worth: Tensor
) -> None:
    """Bring evicted rows back at their true positions, and forget those that leave for them, with what they are worth.

    Raises what the store raises; then nothing has changed.
    """
    assert session.slot is not None, "only a session in a slot is repaired"
    rows = store.gather_selection(session.name, change.promoted)
    _forget(cache, session, change.demoted, worth)
    for layer, (keys, values) in enumerate(rows):
        there = change.promoted[layer] >= 0
        positions = torch.where(there, change.promoted[layer], EMPTY).to(torch.int32)
        cache.insert(session.slot, layer, positions, keys, values, there)
    session.promoted_rows = len(tokens_of(change.promoted))


def _forget(
    cache: ActiveCache, session: WorkerSession, demoted: Sequence[Tensor], worth: Tensor
) -> None:
    assert session.slot is not None, "only a session in a slot is repaired"
    tokens = tokens_of(demoted)
    if not len(tokens):
        return
    for layer, positions in enumerate(demoted):
        held = cache.read(session.slot, layer).positions
        leaving = position_mask(positions.to(held.device), session.length)
        leaves = leaving.gather(1, held.clamp(max=session.length - 1).long())
        cache.keep(session.slot, layer, mask_to_indices((held != EMPTY) & ~leaves))
    session.scores_of_evicted()[tokens] = worth.cpu().reshape(-1, session.length).amax(0)[tokens]


def tokens_of(wanted: Sequence[Tensor]) -> Tensor:
    """The tokens of which some row is wanted: int64, ascending."""
    tokens = torch.cat(
        [torch.empty(0, dtype=torch.int64), *(positions.flatten() for positions in wanted)]
    )
    found: Tensor = torch.unique(tokens[tokens >= 0])
    return found


def withdraw(cache: ActiveCache, session: WorkerSession) -> None:
    """Forget what the last repair brought back: a better signal chooses again from everything."""
    assert session.slot is not None, "only a session in a slot is repaired"
    if not session.promoted_rows:
        return
    for layer in range(cache.shape.n_layers):
        rows = cache.read(session.slot, layer)
        cache.keep(session.slot, layer, mask_to_indices((rows.positions != EMPTY) & ~rows.promoted))
    session.promoted_rows = 0
