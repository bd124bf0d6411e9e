"""The active rows: a fixed number of preallocated slots, each the working set of one session."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.cache.devices import Devices, list_devices
from workers.cache.slot_pool import EMPTY, KVRows, KVShape, SlotPool
from workers.cache.transfers import Transfers
from workers.parallel.alone import Alone
from workers.parallel.group import Group

__all__ = ["EMPTY", "ActiveCache", "KVRows", "KVShape"]


@dataclass(frozen=True)
class SlotRows:
    """A slot in host memory.

    Attributes:
        bound: Bound on its rows per head, per layer.
        layers: Rows per layer.
        side: Copy of the companion's slot; None without one.
    """

    bound: tuple[int, ...]
    layers: tuple[KVRows, ...]
    side: object = None


class Companion(Protocol):
    """Slots of the same numbers that are claimed and released with those of the active rows."""

    def claim(self, slot: int) -> None:
        """Take the slot."""

    def release(self, slot: int) -> None:
        """Return the slot, empty."""

    def copy(self, slot: int) -> object:
        """Copy the slot's content to the host."""

    def put(self, slot: int, content: object) -> None:
        """Give an empty slot a content that was copied."""


@dataclass(frozen=True)
class _Surplus:
    """Rows that a slot has here beyond the rank with the fewest: room, and rows of the shortest head.

    The same however many tokens are appended to all heads, or dropped again.
    """

    free: int
    shortest: int


class ActiveCache:
    """Working sets of sessions: `slots` slots of `n_kv_heads * sum(rows)` rows each.

    Memory never grows. The heads of a layer may hold different numbers of rows, and a session may
    divide its slot between the layers as it needs (`claim`). Rows of a head are in ascending order
    of their true positions. The bound is on a layer's rows over all its heads.

    Attributes:
        pool: The tensors.
        lengths: Rows of each head, int64 `[n_layers, slots, n_kv_heads]`.
        bound: Maximum rows per head, mean over the heads, int64 `[n_layers, slots]`.
        peak: Highest number of rows so far, in the same unit.
        device: Device that work on rows of all layers runs on: the first layer's. What is read is there.
        transfers: Copies onto this device and off it, for all that work on these rows.
        group: The ranks that have the other heads of the same slots.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        rows: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: Devices = "cpu",
        companion: Companion | None = None,
        group: Group = Alone(),
    ) -> None:
        """Allocate the slots; rows: rows per head of each layer in the default division.

        device: of all layers, or of each.
        """
        assert len(rows) == shape.n_layers, "one capacity per layer"
        self.shape = shape
        self.slots = slots
        self.rows = tuple(rows)
        self.dtype = dtype
        devices = list_devices(device, shape.n_layers)
        self.device = devices[0]
        self.pool = SlotPool(shape, slots, rows, dtype, devices)
        self.lengths = self.pool.lengths
        self.bound = torch.zeros(shape.n_layers, slots, dtype=torch.int64)
        self.peak = torch.zeros(shape.n_layers, slots, dtype=torch.int64)
        self.group = group
        self._free = list(range(slots))
        self._surplus: dict[int, _Surplus] = {}
        self._companion = companion
        self._transfers = [Transfers(memory.device) for memory in self.pool.memories]
        self.transfers = self._transfers[0]

    def has_room(self, bound: Sequence[int]) -> bool:
        """Check if a slot may be divided so: each device has room for its own layers alone."""
        return self.pool.has_room(bound)

    def free_slots(self) -> int:
        """Number of slots that no session holds."""
        return len(self._free)

    def claim(self, bound: Sequence[int]) -> int:
        """Take the lowest free slot for a session; layer l may hold `n_kv_heads * bound[l]` rows.

        Sessions that fit into the default division all use it: when they decode together, attention
        reads their rows without a copy.
        """
        assert self._free, "a slot is claimed only when one is free"
        assert self.pool.has_room(bound), "bound over the slot's capacity"
        fits = all(b <= n for b, n in zip(bound, self.rows, strict=True))
        slot = min(self._free)
        self.pool.divide(slot, self.rows if fits else bound)
        self._free.remove(slot)
        self._surplus.pop(slot, None)
        self.bound[:, slot] = torch.tensor(bound)
        self.peak[:, slot] = 0
        if self._companion is not None:
            self._companion.claim(slot)
        return slot

    def release(self, slot: int) -> None:
        """Return the slot, empty."""
        assert slot not in self._free, "a slot is released once"
        self.clear(slot)
        self._free.append(slot)
        if self._companion is not None:
            self._companion.release(slot)

    def copy(self, slot: int) -> SlotRows:
        """Copy a slot's rows to the host."""
        layers = []
        for layer in range(self.shape.n_layers):
            rows = self.read(slot, layer)
            layers.append(KVRows(*(each.to("cpu", copy=True) for each in rows.tensors())))
        side = None if self._companion is None else self._companion.copy(slot)
        return SlotRows(tuple(self.bound[:, slot].tolist()), tuple(layers), side)

    def take(self, slot: int) -> SlotRows:
        """Copy a slot's rows to the host and return the slot, empty."""
        taken = self.copy(slot)
        self.release(slot)
        return taken

    def put_back(self, taken: SlotRows) -> int:
        """Claim a slot for rows that were taken from one; returns it."""
        slot = self.claim(taken.bound)
        for layer, rows in enumerate(taken.layers):
            self.fill(slot, layer, rows)
        if self._companion is not None:
            self._companion.put(slot, taken.side)
        return slot

    def clear(self, slot: int) -> None:
        """Drop every row of the slot, and zero its keys and values."""
        self.pool.clear(slot)

    def longest_heads(self, slot: int) -> list[int]:
        """Rows of the longest head, per layer."""
        return [int(n) for n in self.lengths[:, slot].amax(-1)]

    def rows_per_head(self, slot: int) -> list[int]:
        """Rows per head, per layer: the mean over the heads, rounded up."""
        return [int(n) for n in self._per_head(self.lengths[:, slot])]

    def holds_all(self, slot: int, length: int) -> bool:
        """Check if every head of every layer holds all rows of a session of `length` tokens.

        Of all ranks: each of them asks.
        """
        return int(self.lengths[:, slot].min()) - self._compare(slot).shortest == length

    def free_rows(self, slot: int) -> int:
        """Number of tokens that can be appended before a layer reaches its bound, on any rank.

        Each rank asks.
        """
        return self._get_free(slot) - self._compare(slot).free

    def _get_free(self, slot: int) -> int:
        return int((self.bound[:, slot] - self._per_head(self.lengths[:, slot])).min())

    def _compare(self, slot: int) -> _Surplus:
        """Compare a slot with those of the ranks, once until its heads change otherwise than alike."""
        if slot not in self._surplus:
            own = (self._get_free(slot), int(self.lengths[:, slot].min()))
            least = [min(each) for each in zip(*self.group.gather(own), strict=True)]
            self._surplus[slot] = _Surplus(own[0] - least[0], own[1] - least[1])
        return self._surplus[slot]

    def read(self, slot: int, layer: int) -> KVRows:
        """Read a slot's rows; views unless one head is much longer, or the layer is on another device."""
        rows = self.pool.read(slot, layer)
        if self.pool.home[layer] == 0:
            return rows
        return KVRows(*(each.to(self.device) for each in rows.tensors()))

    def get_rows(self, slot: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Read a slot's keys, values and positions.

        Returns keys and values `[n_kv_heads, n, head_dim]` and positions int32 `[n_kv_heads, n]`,
        n the longest head's length; shorter heads have `EMPTY` positions at their end.
        """
        rows = self.read(slot, layer)
        return rows.keys, rows.values, rows.positions

    def keep(self, slot: int, layer: int, indices: Tensor) -> None:
        """Keep the rows at `indices` and evict the others.

        indices: int64 `[n_kv_heads, m]`, ascending, -1 for none at a head's end. Evicted rows are
        only dropped: every row is in the row store already.
        """
        indices = self.pool.get_memory(layer).send(indices)
        rows = self.pool.read(slot, layer).gather(indices.clamp(min=0)).masked(indices >= 0)
        self._write(slot, layer, rows)

    def fill(self, slot: int, layer: int, rows: KVRows) -> None:
        """Write rows, ascending by position, into a layer that has none."""
        assert not self.lengths[layer, slot].any(), "only an empty layer is filled"
        self._write(slot, layer, KVRows(*self._send(layer, rows.tensors())))

    def insert(
        self,
        slot: int,
        layer: int,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        promoted: Tensor,
        accumulated: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> None:
        """Insert rows at their true positions, among the resident ones.

        Args:
            slot: The session's slot.
            layer: Index of the layer.
            positions: int32 `[n_kv_heads, m]`, `EMPTY` for none; none of them resident.
            keys: `[n_kv_heads, m, head_dim]`.
            values: `[n_kv_heads, m, head_dim]`.
            promoted: bool `[n_kv_heads, m]`, see `KVRows`.
            accumulated: float32 `[n_kv_heads, m]`; 0 if not given.
            keep: bool `[n_kv_heads, n]`, of the rows that `read` returns: those that are not evicted
                first; all if not given.
        """
        sums = (
            torch.zeros_like(positions, dtype=torch.float32) if accumulated is None else accumulated
        )
        new = KVRows(keys.to(self.dtype), values.to(self.dtype), positions, promoted, sums)
        added = self._send(layer, new.tensors())
        resident = self.pool.read(slot, layer)
        if keep is not None:
            resident = resident.masked(self.pool.get_memory(layer).send(keep))
        pairs = zip(resident.tensors(), added, strict=True)
        rows = KVRows(*(torch.cat(pair, dim=1) for pair in pairs))
        longest = int((rows.positions != EMPTY).sum(1).max()) if rows.positions.numel() else 0
        order = rows.positions.sort(dim=1, stable=True).indices[:, :longest]
        self._write(slot, layer, rows.gather(order))

    def accumulate(self, slot: int, layer: int, amounts: Tensor) -> None:
        """Add float32 `[n_kv_heads, n]` to the accumulated sums of the rows that `read` returns."""
        self.pool.accumulate(slot, layer, amounts)

    def drop_last(self, slot: int, count: int) -> None:
        """Drop the last `count` rows of every head: a patched prompt that was scored."""
        assert bool((self.lengths[:, slot] >= count).all()), (
            "cannot drop more rows than a head holds"
        )
        self.lengths[:, slot] -= count
        ends = self.pool.starts[:, slot] + self.lengths[:, slot]
        for index, memory in enumerate(self.pool.memories):
            own = ends[self.pool.list_layers(index)]
            dropped = memory.send((own[..., None] + torch.arange(count)).flatten())
            memory.positions[slot, dropped] = EMPTY
            memory.promoted[slot, dropped] = False
            memory.accumulated[slot, dropped] = 0

    def drop_from(self, slot: int, position: int) -> None:
        """Drop the rows of tokens from `position` on, in every head."""
        for layer in range(self.shape.n_layers):
            positions = self.read(slot, layer).positions
            order = torch.arange(positions.shape[1], device=positions.device)
            self.keep(slot, layer, order.where(positions < position, -1))

    def keep_from(self, slot: int, layer: int, position: int) -> None:
        """Drop the rows of a layer that are before `position`, alike in all heads."""
        positions = self.read(slot, layer).positions
        first = int((positions[0] < position).sum())
        heads, n = positions.shape
        self.keep(slot, layer, torch.arange(first, n, device=positions.device).expand(heads, -1))

    def clear_promoted(self, slot: int) -> None:
        """Make promoted rows ordinary ones, which the next eviction ranks with the others."""
        for memory in self.pool.memories:
            memory.promoted[slot] = False

    def active_bytes(self, slot: int) -> int:
        """Bytes of the keys and values of the slot's rows."""
        return int(self.lengths[:, slot].sum()) * self.shape.row_bytes(self.dtype)

    def check_integrity(self) -> None:
        """Assert every invariant: bounds, disjoint heads, ascending positions, empty indices."""
        for slot in range(self.slots):
            self._check_slot(slot)
        claimed = sorted(set(range(self.slots)) - set(self._free))
        assert bool((self._per_head(self.lengths) <= self.bound)[:, claimed].all()), (
            "over the bound"
        )
        assert not self.lengths[:, self._free].any(), "a free slot holds rows"

    def require_bound(self, layers: slice, slots: list[int], lengths: Tensor) -> None:
        """Assert the bound for new lengths, int64 `[layers, B, n_kv_heads]`, and update the peak.

        Every change of lengths is checked here.
        """
        per_head = self._per_head(lengths)
        bound = self.bound[layers, slots]
        assert bool((per_head <= bound).all()), (
            f"slots {slots} would hold {per_head.tolist()} rows per head, bound {bound.tolist()}"
        )
        self.peak[layers, slots] = torch.maximum(self.peak[layers, slots], per_head)

    def _write(self, slot: int, layer: int, rows: KVRows) -> None:
        """Replace the slot's rows in this layer by `rows`, sorted by position."""
        self._surplus.pop(slot, None)
        lengths = (rows.positions != EMPTY).sum(-1).cpu()
        self.require_bound(slice(layer, layer + 1), [slot], lengths[None, None])
        self.pool.write(slot, layer, rows, lengths)

    def _send(self, layer: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin to copy tensors onto a layer's device."""
        return self._transfers[self.pool.home[layer]].to_device(tensors)

    def _per_head(self, lengths: Tensor) -> Tensor:
        return -(-lengths.sum(-1) // self.shape.n_kv_heads)

    def _check_slot(self, slot: int) -> None:
        for index, memory in enumerate(self.pool.memories):
            empty = self._check_layers(slot, memory.capacity, self.pool.list_layers(index))
            assert bool((memory.positions[slot].cpu()[empty] == EMPTY).all()), (
                "an empty index has a position"
            )
            assert not bool(memory.promoted[slot].cpu()[empty].any()), (
                "an empty index is marked promoted"
            )
            assert not bool(memory.accumulated[slot].cpu()[empty].any()), (
                "an empty index has accumulated"
            )

    def _check_layers(self, slot: int, capacity: int, layers: Sequence[int]) -> Tensor:
        """Check the rows of a device's layers; returns which indices are empty, bool `[capacity]`."""
        rows_at = torch.zeros(capacity, dtype=torch.int64)
        for layer in layers:
            lengths = self.lengths[layer, slot]
            starts = self.pool.starts[layer, slot]
            found = self.pool.row_indices(layer, starts, lengths, int(lengths.max()))
            indices, resident = (tensor.cpu() for tensor in found)
            rows_at.index_add_(0, indices[resident], torch.ones_like(indices[resident]))
            positions = self.read(slot, layer).positions.cpu()
            ascending = positions[:, 1:] > positions[:, :-1]
            assert bool((ascending | ~resident[:, 1:]).all()), "rows out of order, or one twice"
            assert bool(((positions != EMPTY) == resident).all()), "positions and lengths disagree"
        assert bool((rows_at <= 1).all()), "two rows at one index"
        return rows_at == 0
