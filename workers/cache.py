"""The active rows: a fixed number of slots, each a session's working set, preallocated once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

EMPTY = torch.iinfo(torch.int32).max
"""The position of a place that holds no row. It is after every query, so causality alone hides it."""


@dataclass(frozen=True)
class RowShape:
    """What a row is in one model: `n_layers` layers of `n_kv_heads` heads of `head_dim` numbers."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row: the key and the value of one token in one layer and KV head."""
        return 2 * self.head_dim * dtype.itemsize


class ActiveCache:
    """`slots` working sets; layer l of a slot has `rows[l]` places per KV head, so memory never grows.

    Places `0 .. length-1` of a head hold its rows in ascending order of their true positions; the rest is empty.
    The heads of a layer may hold different numbers of rows. Tensors per layer, on `device`:

    - `keys[l]`, `values[l]`: `[slots, n_kv_heads, rows[l], head_dim]`, the model's dtype, keys after RoPE;
    - `positions[l]`: int32 `[slots, n_kv_heads, rows[l]]`, `EMPTY` where there is no row;
    - `promoted[l]`: bool, the same shape: rows that a repair brought back;
    - `lengths`: int64 `[n_layers, slots, n_kv_heads]`, on the CPU, where the control flow needs it.
    """

    def __init__(
        self,
        shape: RowShape,
        slots: int,
        rows: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        assert len(rows) == shape.n_layers, "one capacity per layer"
        self.shape, self.slots, self.rows, self.dtype = shape, slots, tuple(rows), dtype
        self.device = torch.device(device)
        heads, dim = shape.n_kv_heads, shape.head_dim
        self.keys = [torch.zeros(slots, heads, n, dim, dtype=dtype, device=device) for n in rows]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.positions = [torch.full((slots, heads, n), EMPTY, dtype=torch.int32, device=device) for n in rows]
        self.promoted = [torch.zeros(slots, heads, n, dtype=torch.bool, device=device) for n in rows]
        self.lengths = torch.zeros(shape.n_layers, slots, heads, dtype=torch.int64)
        self.bound = torch.zeros(shape.n_layers, slots, dtype=torch.int64)
        self.peak = torch.zeros(shape.n_layers, slots, dtype=torch.int64)
        self._free = list(range(slots))

    def free_slots(self) -> int:
        """Slots that no session holds."""
        return len(self._free)

    def claim(self, bound: Sequence[int]) -> int:
        """Take the lowest free slot for a session that may hold `bound[l]` rows per head in layer l, never more."""
        assert self._free, "a slot is claimed only when one is free"
        assert all(b <= n for b, n in zip(bound, self.rows, strict=True)), "bound over the slot's capacity"
        slot = min(self._free)
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
        """Forget every row of the slot.

        Keys and values are zeroed too: attention multiplies hidden rows by 0, and what a session left behind (a NaN
        times 0 is a NaN) must not reach the next one.
        """
        self.lengths[:, slot] = 0
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[slot] = 0
            values[slot] = 0
        for positions, promoted in zip(self.positions, self.promoted, strict=True):
            positions[slot] = EMPTY
            promoted[slot] = False

    def longest(self, slot: int) -> list[int]:
        """Rows of the longest head, per layer."""
        return [int(n) for n in self.lengths[:, slot].amax(-1)]

    def begin(self, slots: Sequence[int], query_positions: Tensor, observe: int = 0) -> "Step":
        """Open one forward pass over `slots`; see `Step`."""
        return Step(self, slots, query_positions, observe)

    def rows_of(self, slot: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of a slot's rows: keys and values `[n_kv_heads, n, head_dim]`, positions `[n_kv_heads, n]`.

        `n` is the longest head's length; shorter heads have `EMPTY` positions at their end.
        """
        n = int(self.lengths[layer, slot].max())
        return (
            self.keys[layer][slot, :, :n],
            self.values[layer][slot, :, :n],
            self.positions[layer][slot, :, :n],
        )

    def keep(self, slot: int, layer: int, places: Tensor) -> None:
        """Keep the rows at `places`, int64 `[n_kv_heads, m]` ascending, -1 for "none" at a head's end. Evict the rest.

        Evicting is forgetting: every row is in the row store already.
        """
        held = places >= 0
        source = places.clamp(min=0)
        wide = source[..., None].expand(-1, -1, self.shape.head_dim)
        self._write(
            slot,
            layer,
            self.keys[layer][slot].gather(1, wide),
            self.values[layer][slot].gather(1, wide),
            torch.where(held, self.positions[layer][slot].gather(1, source), EMPTY),
            self.promoted[layer][slot].gather(1, source) & held,
        )

    def insert(self, slot: int, layer: int, positions: Tensor, keys: Tensor, values: Tensor, promoted: Tensor) -> None:
        """Bring rows in at their true positions, among those that are there.

        positions: int32 `[n_kv_heads, m]`, `EMPTY` for "none", none of them held already; keys, values
        `[n_kv_heads, m, head_dim]`; promoted: bool `[n_kv_heads, m]`.
        """
        old_keys, old_values, old_positions = self.rows_of(slot, layer)
        n = old_positions.shape[1]
        merged = torch.cat([old_positions, positions.to(self.device)], dim=1)
        merged, order = merged.sort(dim=1, stable=True)
        wide = order[..., None].expand(-1, -1, self.shape.head_dim)
        flags = torch.cat([self.promoted[layer][slot, :, :n], promoted.to(self.device)], dim=1)
        self._write(
            slot,
            layer,
            torch.cat([old_keys, keys.to(self.device, self.dtype)], dim=1).gather(1, wide),
            torch.cat([old_values, values.to(self.device, self.dtype)], dim=1).gather(1, wide),
            merged,
            flags.gather(1, order),
        )

    def trim(self, slot: int, count: int) -> None:
        """Forget the last `count` rows of every head: a patched prompt that was scored."""
        assert bool((self.lengths[:, slot] >= count).all()), "cannot trim more rows than a head holds"
        self.lengths[:, slot] -= count
        ends = self.lengths[:, slot].to(self.device)
        for layer, positions in enumerate(self.positions):
            places = torch.arange(self.rows[layer], device=self.device)
            past = places >= ends[layer][:, None]
            positions[slot].masked_fill_(past, EMPTY)
            self.promoted[layer][slot].masked_fill_(past, False)

    def clear_promoted(self, slot: int) -> None:
        """Promoted rows become rows like any other: they must earn their place at the next eviction."""
        for promoted in self.promoted:
            promoted[slot] = False

    def active_bytes(self, slot: int) -> int:
        """Bytes of the keys and values that the slot's rows take."""
        return int(self.lengths[:, slot].sum()) * self.shape.row_bytes(self.dtype)

    def check_integrity(self) -> None:
        """Assert every invariant: bounds, order, no row twice, empty places empty."""
        for layer in range(self.shape.n_layers):
            lengths = self.lengths[layer]
            assert bool((lengths.amax(-1) <= self.rows[layer]).all()), "a slot is over its capacity"
            held = torch.arange(self.rows[layer]) < lengths[..., None]
            positions = self.positions[layer].cpu()
            assert bool(((positions != EMPTY) == held).all()), "places and lengths disagree"
            ascending = positions[..., 1:] > positions[..., :-1]
            assert bool((ascending | ~held[..., 1:]).all()), "rows out of order, or one twice"
            assert not bool((self.promoted[layer].cpu() & ~held).any()), "an empty place is marked promoted"
        for slot in set(range(self.slots)) - set(self._free):
            assert bool((self.lengths[:, slot].amax(-1) <= self.bound[:, slot]).all()), "over the bound"
        assert not self.lengths[:, self._free].any(), "a free slot holds rows"

    def _write(self, slot: int, layer: int, keys: Tensor, values: Tensor, positions: Tensor, promoted: Tensor) -> None:
        """Make these, sorted by position, the slot's rows in this layer."""
        lengths = (positions != EMPTY).sum(-1).cpu()
        n = int(lengths.max()) if lengths.numel() else 0
        self._require_bound(slice(layer, layer + 1), [slot], lengths[None, None])
        self.lengths[layer, slot] = lengths
        self.keys[layer][slot, :, :n] = keys[:, :n]
        self.values[layer][slot, :, :n] = values[:, :n]
        self.positions[layer][slot] = EMPTY
        self.positions[layer][slot, :, :n] = positions[:, :n].to(torch.int32)
        self.promoted[layer][slot] = False
        self.promoted[layer][slot, :, :n] = promoted[:, :n]

    def _require_bound(self, layers: slice, slots: list[int], lengths: Tensor) -> None:
        """Hold the bound, and note the peak, for lengths-to-be `[layers, B, n_kv_heads]`: every change asks here."""
        longest, bound = lengths.amax(-1), self.bound[layers, slots]
        assert bool((longest <= bound).all()), (
            f"slots {slots} would hold {longest.tolist()} rows, bound {bound.tolist()}"
        )
        self.peak[layers, slots] = torch.maximum(self.peak[layers, slots], longest)


class Step(Cache):
    """One forward pass: the cache that transformers sees, for B slots with t new tokens each.

    New rows are appended in their slots as the layers run. Afterwards `new_keys` and `new_values` hold them per
    layer, `[B, n_kv_heads, t, head_dim]`, for the row store, and `observed`, per layer, the post-RoPE queries of
    the last `observe` tokens, `[B, n_heads, observe, head_dim]`.

    query_positions: int `[B, t]`, the new tokens' true positions.
    """

    def __init__(self, cache: ActiveCache, slots: Sequence[int], query_positions: Tensor, observe: int) -> None:
        super().__init__(layers=[])
        assert len(set(slots)) == len(slots), "a slot stands once in a step"
        self.cache, self.observe = cache, observe
        self.slot_list = list(slots)
        self.query_positions = query_positions.to(cache.device, torch.int32)
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []
        self.observed: list[Tensor] = []
        tokens = query_positions.shape[1]
        before = cache.lengths[:, self.slot_list]
        self._lengths = before + tokens
        cache._require_bound(slice(None), self.slot_list, self._lengths)
        self._longest = self._lengths.amax((1, 2)).tolist()
        # One transfer for all layers: [n_layers, B, n_kv_heads, t], the places where the new rows go.
        self._places = (before[..., None] + torch.arange(tokens)).to(cache.device, non_blocking=True)
        self._slots = torch.tensor(self.slot_list, device=cache.device)
        self._heads = torch.arange(cache.shape.n_kv_heads, device=cache.device)
        lowest, count = min(slots), len(slots)
        contiguous = self.slot_list == list(range(lowest, lowest + count))
        self._index: slice | Tensor = slice(lowest, lowest + count) if contiguous else self._slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append layer `layer_idx`'s new rows and return all rows that it may attend to.

        key_states, value_states: `[B, n_kv_heads, t, head_dim]`. Returns keys and values
        `[B, n_kv_heads, n, head_dim]`, n the longest head of the batch; `key_positions` has their positions.
        """
        cache = self.cache
        cache.lengths[layer_idx, self.slot_list] = self._lengths[layer_idx]
        where = (self._slots[:, None, None], self._heads[None, :, None], self._places[layer_idx])
        cache.keys[layer_idx][where] = key_states.to(cache.dtype)
        cache.values[layer_idx][where] = value_states.to(cache.dtype)
        cache.positions[layer_idx][where] = self.query_positions[:, None, :].expand(-1, len(self._heads), -1)
        self.new_keys.append(key_states)
        self.new_values.append(value_states)
        n = self._longest[layer_idx]
        return cache.keys[layer_idx][self._index, :, :n], cache.values[layer_idx][self._index, :, :n]

    def key_positions(self, layer_idx: int) -> Tensor:
        """Positions of the rows that `update` returned: int32 `[B, n_kv_heads, n]`."""
        return self.cache.positions[layer_idx][self._index, :, : self._longest[layer_idx]]

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
