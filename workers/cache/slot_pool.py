"""Where active rows lie: one run of places per slot, divided between the layers and heads as a session needs it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EMPTY = torch.iinfo(torch.int32).max
"""The position of a place that holds no row. It is after every query, so causality alone hides it."""


@dataclass(frozen=True)
class KVShape:
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


@dataclass(frozen=True)
class KVRows:
    """Rows of one layer of one slot, by position; shorter heads have `EMPTY` positions at their end.

    keys, values `[n_kv_heads, n, head_dim]`; positions int32, promoted bool (brought back by a repair), accumulated
    float32 (what a method's observations added up to), each `[n_kv_heads, n]`.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    promoted: Tensor
    accumulated: Tensor

    def taken(self, order: Tensor) -> "KVRows":
        """A copy with the rows at `order`, int64 `[n_kv_heads, m]`."""
        wide = order[..., None].expand(-1, -1, self.keys.shape[-1])
        return KVRows(
            self.keys.gather(1, wide),
            self.values.gather(1, wide),
            self.positions.gather(1, order),
            self.promoted.gather(1, order),
            self.accumulated.gather(1, order),
        )

    def masked(self, held: Tensor) -> "KVRows":
        """The same keys and values, where `held` bool `[n_kv_heads, n]` is False of no row."""
        return KVRows(
            self.keys,
            self.values,
            torch.where(held, self.positions, EMPTY),
            self.promoted & held,
            self.accumulated * held,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the fields."""
        return self.keys, self.values, self.positions, self.promoted, self.accumulated


class SlotPool:
    """`slots` runs of `places` places each, allocated once. A session divides its run between layers and heads.

    Layer l has a region of `n_kv_heads * widths[l]` places. As long as its longest head fits in `widths[l]`, the
    heads lie evenly spaced, and reading is a view; else each has its own length and an even share of what is free.
    So a layer's heads share its region, whatever their lengths. Tensors, on `device`:

    - `keys`, `values`: `[slots, places, head_dim]`, the model's dtype, keys after RoPE;
    - `positions`: int32 `[slots, places]`, `EMPTY` where there is no row;
    - `promoted`: bool, `accumulated`: float32, the same shape; see `KVRows`.

    On the CPU, where the control flow needs them, int64: `lengths` and `starts` `[n_layers, slots, n_kv_heads]`, the
    rows of each head and the place of its first; `widths` and `regions` `[n_layers, slots]`, and bool `even`.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.shape = shape
        self.slots = slots
        self.places = places
        self.dtype = dtype
        self.device = torch.device(device)
        self.keys = torch.zeros(slots, places, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.full((slots, places), EMPTY, dtype=torch.int32, device=device)
        self.promoted = torch.zeros(slots, places, dtype=torch.bool, device=device)
        self.accumulated = torch.zeros(slots, places, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(shape.n_layers, slots, shape.n_kv_heads, dtype=torch.int64)
        self.starts = torch.zeros_like(self.lengths)
        self.widths = torch.zeros(shape.n_layers, slots, dtype=torch.int64)
        self.regions = torch.zeros_like(self.widths)
        self.even = torch.ones(shape.n_layers, slots, dtype=torch.bool)

    def divide(self, slot: int, widths: Sequence[int]) -> None:
        """Give layer l of an empty slot `n_kv_heads * widths[l]` places."""
        heads = self.shape.n_kv_heads
        assert sum(widths) * heads <= self.places, "more rows than a slot's capacity"
        assert not self.lengths[:, slot].any(), "only an empty slot is divided"
        width = torch.tensor(widths)
        self.widths[:, slot] = width
        self.regions[:, slot] = heads * (width.cumsum(0) - width)
        self.starts[:, slot] = self.regions[:, slot, None] + width[:, None] * torch.arange(heads)
        self.even[:, slot] = True

    def clear(self, slot: int) -> None:
        """Forget every row of the slot.

        Keys and values are zeroed too: attention multiplies hidden rows by 0, and what a session left behind (a NaN
        times 0 is a NaN) must not reach the next one.
        """
        self.lengths[:, slot] = 0
        self.keys[slot], self.values[slot], self.positions[slot] = 0, 0, EMPTY
        self.promoted[slot], self.accumulated[slot] = False, 0

    def read(self, slot: int, layer: int) -> KVRows:
        """The rows of one layer: views where its heads are evenly spaced, else copies."""
        lengths = self.lengths[layer, slot]
        n = int(lengths.max())
        if self.even[layer, slot]:
            return KVRows(*(self._heads(tensor, slot, layer)[:, :n] for tensor in self.tensors()))
        places, held = self.places_of(self.starts[layer, slot], lengths, n)
        return KVRows(*(tensor[slot, places] for tensor in self.tensors())).masked(held)

    def write(self, slot: int, layer: int, rows: KVRows, lengths: Tensor) -> None:
        """Make copies of these, int64 `[n_kv_heads]` per head, the rows of the layer."""
        n = int(lengths.max())
        width = int(self.widths[layer, slot])
        self.lengths[layer, slot] = lengths
        if n > width:
            self._write_unevenly(slot, layer, rows)
            return
        self._forget_marks(slot, layer)
        self.even[layer, slot] = True
        self.starts[layer, slot] = self.regions[layer, slot] + width * torch.arange(
            self.shape.n_kv_heads
        )
        for tensor, new in zip(self.tensors(), rows.tensors(), strict=True):
            self._heads(tensor, slot, layer)[:, :n] = new[:, :n]

    def accumulate(self, slot: int, layer: int, amounts: Tensor) -> None:
        """Add float32 `[n_kv_heads, n]` to what the rows, as `read` has them, have accumulated."""
        lengths = self.lengths[layer, slot]
        places, held = self.places_of(self.starts[layer, slot], lengths, int(lengths.max()))
        self.accumulated[slot].index_put_((places,), amounts * held, accumulate=True)

    def make_way(self, slots: list[int], lengths: Tensor) -> None:
        """Space heads unevenly where they could not grow to `lengths` `[n_layers, B, n_kv_heads]` as they lie."""
        cramped = self.even[:, slots] & (lengths.amax(-1) > self.widths[:, slots])
        for layer, index in cramped.nonzero().tolist():
            self._write_unevenly(slots[index], layer, self.read(slots[index], layer))

    def places_of(self, starts: Tensor, lengths: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Where heads' first `n` rows lie, for starts and lengths `[..., n_kv_heads]`: int64 and bool `[..., n]`.

        The bool says which there are; for the others the head's last place is named, which holds no NaN of others.
        """
        count = torch.arange(n, device=starts.device)
        held = count < lengths[..., None]
        places = starts[..., None] + torch.minimum(count, (lengths[..., None] - 1).clamp(min=0))
        return places.to(self.device), held.to(self.device)

    def _write_unevenly(self, slot: int, layer: int, rows: KVRows) -> None:
        """Each head gets its length and an even share of the layer's free places."""
        heads = self.shape.n_kv_heads
        lengths = self.lengths[layer, slot]
        share = int(self.widths[layer, slot]) - -(-int(lengths.sum()) // heads)
        assert share >= 0, "the bound was held before"
        taken = lengths + share
        self.starts[layer, slot] = self.regions[layer, slot] + taken.cumsum(0) - taken
        self.even[layer, slot] = False
        held = rows.positions != EMPTY
        places, _ = self.places_of(self.starts[layer, slot], lengths, held.shape[1])
        # Copies, made before anything is written: the rows may lie where others are going to.
        moved = [tensor[held] for tensor in rows.tensors()]
        self._forget_marks(slot, layer)
        for tensor, new in zip(self.tensors(), moved, strict=True):
            tensor[slot, places[held]] = new

    def _forget_marks(self, slot: int, layer: int) -> None:
        for tensor, empty in (
            (self.positions, EMPTY),
            (self.promoted, False),
            (self.accumulated, 0),
        ):
            self._region(tensor, slot, layer).fill_(empty)

    def _region(self, tensor: Tensor, slot: int, layer: int) -> Tensor:
        start = int(self.regions[layer, slot])
        count = self.shape.n_kv_heads * int(self.widths[layer, slot])
        return tensor[slot, start : start + count]

    def _heads(self, tensor: Tensor, slot: int, layer: int) -> Tensor:
        return self._region(tensor, slot, layer).view(self.shape.n_kv_heads, -1, *tensor.shape[2:])

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the fields of `KVRows`."""
        return self.keys, self.values, self.positions, self.promoted, self.accumulated
