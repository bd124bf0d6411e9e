"""The active rows: a fixed number of slots, each a session's working set, preallocated once."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from workers.cache.slot_pool import EMPTY, KVRows, KVShape, SlotPool

__all__ = ["EMPTY", "ActiveCache", "ForwardStep", "KVRows", "KVShape"]


class ActiveCache:
    """`slots` working sets with places for `n_kv_heads * sum(rows)` rows each, so memory never grows.

    The heads of a layer may hold different numbers of rows, and a session may divide its slot between the layers as
    it likes (`claim`): whatever the split, it takes the same memory. Rows of a head are in ascending order of their
    true positions. `pool` has the tensors, `lengths` the rows of each head, int64 `[n_layers, slots, n_kv_heads]`.
    The bound is on a layer's rows over all its heads; it and `peak` are counted in rows per head, int64
    `[n_layers, slots]`.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        rows: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """rows: places per head of each layer, as sessions have them that need no more in any layer."""
        assert len(rows) == shape.n_layers, "one capacity per layer"
        self.shape = shape
        self.slots = slots
        self.rows = tuple(rows)
        self.dtype = dtype
        self.device = torch.device(device)
        self.pool = SlotPool(shape, slots, shape.n_kv_heads * sum(rows), dtype, device)
        self.lengths = self.pool.lengths
        self.bound = torch.zeros(shape.n_layers, slots, dtype=torch.int64)
        self.peak = torch.zeros(shape.n_layers, slots, dtype=torch.int64)
        self._free = list(range(slots))

    def free_slots(self) -> int:
        """Slots that no session holds."""
        return len(self._free)

    def claim(self, bound: Sequence[int]) -> int:
        """Take the lowest free slot for a session whose layer l may hold `n_kv_heads * bound[l]` rows, never more.

        Sessions that fit into the slot's own division all take that: where they decode together, attention reads
        their rows without a copy.
        """
        assert self._free, "a slot is claimed only when one is free"
        assert sum(bound) <= sum(self.rows), "bound over the slot's capacity"
        fits = all(b <= n for b, n in zip(bound, self.rows, strict=True))
        slot = min(self._free)
        self.pool.divide(slot, self.rows if fits else bound)
        self._free.remove(slot)
        self.bound[:, slot] = torch.tensor(bound)
        self.peak[:, slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Give the slot back, empty."""
        assert slot not in self._free, "a slot is released once"
        self.clear(slot)
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Forget every row of the slot; its keys and values are zeroed."""
        self.pool.clear(slot)

    def longest_heads(self, slot: int) -> list[int]:
        """Rows of the longest head, per layer."""
        return [int(n) for n in self.lengths[:, slot].amax(-1)]

    def rows_per_head(self, slot: int) -> list[int]:
        """Rows per head, per layer: the mean over the heads, rounded up."""
        return [int(n) for n in self._per_head(self.lengths[:, slot])]

    def free_rows(self, slot: int) -> int:
        """How many tokens may still be appended before a layer reaches its bound."""
        return int((self.bound[:, slot] - self._per_head(self.lengths[:, slot])).min())

    def begin_step(
        self, slots: Sequence[int], query_positions: Tensor, observe: int = 0
    ) -> "ForwardStep":
        """Open one forward pass over `slots`; see `ForwardStep`."""
        return ForwardStep(self, slots, query_positions, observe)

    def read(self, slot: int, layer: int) -> KVRows:
        """A slot's rows with their marks; views as long as no head is much longer than the others."""
        return self.pool.read(slot, layer)

    def get_rows(self, slot: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A slot's keys and values `[n_kv_heads, n, head_dim]` and positions `[n_kv_heads, n]`, as `read` has them.

        `n` is the longest head's length; shorter heads have `EMPTY` positions at their end.
        """
        rows = self.read(slot, layer)
        return rows.keys, rows.values, rows.positions

    def keep(self, slot: int, layer: int, places: Tensor) -> None:
        """Keep the rows at `places`, int64 `[n_kv_heads, m]` ascending, -1 for "none" at a head's end. Evict the rest.

        Evicting is forgetting: every row is in the row store already.
        """
        self._write(
            slot, layer, self.read(slot, layer).taken(places.clamp(min=0)).masked(places >= 0)
        )

    def insert(
        self,
        slot: int,
        layer: int,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        promoted: Tensor,
        accumulated: Tensor | None = None,
    ) -> None:
        """Bring rows in at their true positions, among those that are there.

        positions: int32 `[n_kv_heads, m]`, `EMPTY` for "none", none of them held already; keys, values
        `[n_kv_heads, m, head_dim]`; promoted: bool, accumulated: float32 (0 if not given) `[n_kv_heads, m]`.
        """
        sums = (
            torch.zeros_like(positions, dtype=torch.float32) if accumulated is None else accumulated
        )
        new = KVRows(keys.to(self.dtype), values.to(self.dtype), positions, promoted, sums)
        pairs = zip(self.read(slot, layer).tensors(), new.tensors(), strict=True)
        together = KVRows(*(torch.cat([old, added.to(self.device)], dim=1) for old, added in pairs))
        self._write(
            slot, layer, together.taken(together.positions.sort(dim=1, stable=True).indices)
        )

    def accumulate(self, slot: int, layer: int, amounts: Tensor) -> None:
        """Add float32 `[n_kv_heads, n]` to what the rows, as `read` has them, have accumulated."""
        self.pool.accumulate(slot, layer, amounts)

    def drop_last(self, slot: int, count: int) -> None:
        """Forget the last `count` rows of every head: a patched prompt that was scored."""
        assert bool((self.lengths[:, slot] >= count).all()), (
            "cannot trim more rows than a head holds"
        )
        self.lengths[:, slot] -= count
        ends = self.pool.starts[:, slot] + self.lengths[:, slot]
        past = (ends[..., None] + torch.arange(count)).flatten().to(self.device)
        self.pool.positions[slot, past] = EMPTY
        self.pool.promoted[slot, past] = False
        self.pool.accumulated[slot, past] = 0

    def clear_promoted(self, slot: int) -> None:
        """Promoted rows become rows like any other: they must earn their place at the next eviction."""
        self.pool.promoted[slot] = False

    def active_bytes(self, slot: int) -> int:
        """Bytes of the keys and values that the slot's rows take."""
        return int(self.lengths[:, slot].sum()) * self.shape.row_bytes(self.dtype)

    def check_integrity(self) -> None:
        """Assert every invariant: bounds, no head in another's places, order, no row twice, empty places empty."""
        for slot in range(self.slots):
            held = torch.zeros(self.pool.places, dtype=torch.int64)
            for layer in range(self.shape.n_layers):
                places, exists = (tensor.cpu() for tensor in self._places(slot, layer))
                held.index_add_(0, places[exists], torch.ones_like(places[exists]))
                positions = self.read(slot, layer).positions.cpu()
                ascending = positions[:, 1:] > positions[:, :-1]
                assert bool((ascending | ~exists[:, 1:]).all()), "rows out of order, or one twice"
                assert bool(((positions != EMPTY) == exists).all()), "places and lengths disagree"
            assert bool((held <= 1).all()), "two rows in one place"
            empty = held == 0
            assert bool((self.pool.positions[slot].cpu()[empty] == EMPTY).all()), (
                "an empty place has a position"
            )
            assert not bool(self.pool.promoted[slot].cpu()[empty].any()), (
                "an empty place is marked promoted"
            )
            assert not bool(self.pool.accumulated[slot].cpu()[empty].any()), (
                "an empty place has accumulated"
            )
        assert bool((self._per_head(self.lengths) <= self.bound)[:, self._claimed()].all()), (
            "over the bound"
        )
        assert not self.lengths[:, self._free].any(), "a free slot holds rows"

    def require_bound(self, layers: slice, slots: list[int], lengths: Tensor) -> None:
        """Hold the bound, and note the peak, for lengths-to-be `[layers, B, n_kv_heads]`: every change asks here."""
        per_head = self._per_head(lengths)
        bound = self.bound[layers, slots]
        assert bool((per_head <= bound).all()), (
            f"slots {slots} would hold {per_head.tolist()} rows per head, bound {bound.tolist()}"
        )
        self.peak[layers, slots] = torch.maximum(self.peak[layers, slots], per_head)

    def _write(self, slot: int, layer: int, rows: KVRows) -> None:
        """Make these, sorted by position, the slot's rows in this layer."""
        lengths = (rows.positions != EMPTY).sum(-1).cpu()
        self.require_bound(slice(layer, layer + 1), [slot], lengths[None, None])
        self.pool.write(slot, layer, rows, lengths)

    def _per_head(self, lengths: Tensor) -> Tensor:
        return -(-lengths.sum(-1) // self.shape.n_kv_heads)

    def _places(self, slot: int, layer: int) -> tuple[Tensor, Tensor]:
        starts = self.pool.starts[layer, slot]
        lengths = self.lengths[layer, slot]
        return self.pool.places_of(starts, lengths, int(lengths.max()))

    def _claimed(self) -> list[int]:
        return sorted(set(range(self.slots)) - set(self._free))


class ForwardStep(Cache):
    """One forward pass: the cache that transformers sees, for B slots with t new tokens each.

    New rows are appended in their slots as the layers run. Afterwards `new_keys` and `new_values` hold them per
    layer, `[B, n_kv_heads, t, head_dim]`, for the row store, and `observed`, per layer, the post-RoPE queries of
    the last `observe` tokens, `[B, n_heads, observe, head_dim]`.

    query_positions: int `[B, t]`, the new tokens' true positions.
    """

    def __init__(
        self, cache: ActiveCache, slots: Sequence[int], query_positions: Tensor, observe: int
    ) -> None:
        super().__init__(layers=[])
        assert len(set(slots)) == len(slots), "a slot stands once in a step"
        self.cache = cache
        self.observe = observe
        self.slot_list = list(slots)
        self.query_positions = query_positions.to(cache.device, torch.int32)
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []
        self.observed: list[Tensor] = []
        tokens = query_positions.shape[1]
        pool = cache.pool
        before = cache.lengths[:, self.slot_list]
        self._lengths = before + tokens
        cache.require_bound(slice(None), self.slot_list, self._lengths)
        pool.make_way(self.slot_list, self._lengths)
        self._longest: list[int] = self._lengths.amax((1, 2)).tolist()
        starts = pool.starts[:, self.slot_list]
        # One transfer for all layers: [n_layers, B, n_kv_heads, t], the places where the new rows go.
        self._places = ((starts + before)[..., None] + torch.arange(tokens)).to(
            cache.device, non_blocking=True
        )
        self._slots = torch.tensor(self.slot_list, device=cache.device)
        self._windows = self._find_windows()
        if None in self._windows:
            self._starts = starts.to(cache.device)
            self._held = self._lengths.to(cache.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append layer `layer_idx`'s new rows and return all rows that it may attend to.

        key_states, value_states: `[B, n_kv_heads, t, head_dim]`. Returns keys and values
        `[B, n_kv_heads, n, head_dim]`, n the longest head of the batch; `key_positions` has their positions. They
        are views where the slots lie side by side and have their heads in the same places, else copies.
        """
        cache = self.cache
        pool = self.cache.pool
        cache.lengths[layer_idx, self.slot_list] = self._lengths[layer_idx]
        where = self._slots[:, None, None], self._places[layer_idx]
        pool.keys[where] = key_states.to(cache.dtype)
        pool.values[where] = value_states.to(cache.dtype)
        pool.positions[where] = self.query_positions[:, None, :].expand(
            -1, cache.shape.n_kv_heads, -1
        )
        self.new_keys.append(key_states)
        self.new_values.append(value_states)
        if (window := self._windows[layer_idx]) is not None:
            return self._view(pool.keys, layer_idx, window), self._view(
                pool.values, layer_idx, window
            )
        places, held = self._gathered(layer_idx)
        # Row by row from the whole pool: several times as fast as an index of slots and places.
        flat = places.flatten()
        shape = (*held.shape, cache.shape.head_dim)
        keys, values = (
            rows.flatten(0, 1).index_select(0, flat).view(shape)
            for rows in (pool.keys, pool.values)
        )
        return keys, values

    def key_positions(self, layer_idx: int) -> Tensor:
        """Positions of the rows that `update` returned: int32 `[B, n_kv_heads, n]`."""
        positions = self.cache.pool.positions
        if (window := self._windows[layer_idx]) is not None:
            return self._view(positions, layer_idx, window)
        places, held = self._gathered(layer_idx)
        return torch.where(held, positions.flatten()[places], EMPTY)

    def record(self, queries: Tensor) -> None:
        """Hold the last queries of one layer, `[B, n_heads, t, head_dim]`, when this step observes."""
        if self.observe:
            self.observed.append(queries[:, :, -self.observe :].detach().clone())

    def rows(self, index: int) -> Tensor:
        """New rows of the step's `index`-th slot: `[n_layers, 2, n_kv_heads, t, head_dim]`."""
        keys = torch.stack([keys[index] for keys in self.new_keys])
        values = torch.stack([values[index] for values in self.new_values])
        return torch.stack([keys, values], dim=1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows of the longest head of the batch; transformers asks, positions are passed explicitly."""
        return int(self.cache.lengths[layer_idx, self.slot_list].max())

    def _find_windows(self) -> list[tuple[int, int] | None]:
        """Per layer the region's first place and a head's width, where they are the same in slots side by side."""
        pool = self.cache.pool
        slots = self.slot_list
        if slots != list(range(slots[0], slots[0] + len(slots))):
            return [None] * self.cache.shape.n_layers
        regions = pool.regions[:, slots]
        widths = pool.widths[:, slots]
        alike = pool.even[:, slots] & (regions == regions[:, :1]) & (widths == widths[:, :1])
        windows = zip(
            regions[:, 0].tolist(), widths[:, 0].tolist(), alike.all(1).tolist(), strict=True
        )
        return [(region, width) if same else None for region, width, same in windows]

    def _view(self, tensor: Tensor, layer: int, window: tuple[int, int]) -> Tensor:
        (region, width), heads, first = window, self.cache.shape.n_kv_heads, self.slot_list[0]
        run = tensor[first : first + len(self.slot_list), region : region + heads * width]
        return run.view(len(run), heads, width, *tensor.shape[2:])[:, :, : self._longest[layer]]

    def _gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where the rows lie, counted from the first slot's first place, and which there are: `[B, n_kv_heads, n]`."""
        places, held = self.cache.pool.places_of(
            self._starts[layer], self._held[layer], self._longest[layer]
        )
        return places + (self._slots * self.cache.pool.places)[:, None, None], held
