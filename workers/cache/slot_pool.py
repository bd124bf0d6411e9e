"""Memory of the active rows: one run per slot, divided between layers and heads as needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.pool_memory import EMPTY, PoolMemory

__all__ = ["EMPTY", "KVRows", "KVShape", "SlotPool"]


@dataclass(frozen=True)
class KVShape:
    """Shape of a model's rows: `n_layers` layers of `n_kv_heads` heads of `head_dim` numbers.

    Attributes:
        value_dim: Numbers of a value, where they are fewer than a key's; None: as many.
        latent: A row is one latent, key and value in one: the value is its first `value_dim` numbers.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    latent: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row: the key and the value of one token in one layer and KV head."""
        return self.parts * self.head_dim * dtype.itemsize

    @property
    def parts(self) -> int:
        """Tensors of a row: a key and a value, or a latent alone."""
        return 1 if self.latent else 2


@dataclass(frozen=True)
class KVRows:
    """Rows of one layer of one slot, in the order of their positions.

    Attributes:
        keys: Keys after RoPE, `[n_kv_heads, n, head_dim]`.
        values: Values, `[n_kv_heads, n, head_dim]`.
        positions: int32 `[n_kv_heads, n]`; `EMPTY` at the end of shorter heads.
        promoted: True for rows that a repair promoted, bool `[n_kv_heads, n]`.
        accumulated: Sum of a method's observations, float32 `[n_kv_heads, n]`.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    promoted: Tensor
    accumulated: Tensor

    def gather(self, indices: Tensor) -> "KVRows":
        """Copy the rows at `indices`, int64 `[n_kv_heads, m]`."""
        # Whole rows: twice as fast as gathering number by number.
        heads = torch.arange(len(indices), device=indices.device)[:, None]
        return KVRows(
            self.keys[heads, indices],
            self.values[heads, indices],
            self.positions.gather(1, indices),
            self.promoted.gather(1, indices),
            self.accumulated.gather(1, indices),
        )

    def masked(self, resident: Tensor) -> "KVRows":
        """Mark the rows where `resident`, bool `[n_kv_heads, n]`, is False as empty."""
        return KVRows(
            self.keys,
            self.values,
            torch.where(resident, self.positions, EMPTY),
            self.promoted & resident,
            self.accumulated * resident,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return self.keys, self.values, self.positions, self.promoted, self.accumulated


class SlotPool:
    """`slots` runs of rows on each device, allocated once.

    A session divides its run between the layers of the device, and their heads. Layer l has a region of
    `n_kv_heads * widths[l]` rows. As long as its longest head fits in `widths[l]`, the heads are
    evenly spaced, and reading is a view; otherwise each head gets its own length and an even share
    of the free rows. So the heads of a layer share its region, whatever their lengths.

    Attributes:
        memories: The devices' tensors: `keys`, `[slots, capacity, head_dim]` in the model's dtype, after
            RoPE; `values` as `keys`, of latents the same tensor; `positions`, int32 `[slots, capacity]`,
            `EMPTY` where there is no row; `promoted`, bool, and `accumulated`, float32, see `KVRows`.
        home: Index of each layer's memory.
        lengths: Rows of each head, int64 `[n_layers, slots, n_kv_heads]`. This and the following
            are on the CPU, where the control flow needs them.
        starts: Index of each head's first row, int64 `[n_layers, slots, n_kv_heads]`.
        widths: Rows per head of each layer's region, int64 `[n_layers, slots]`.
        regions: Index of each region's first row, int64 `[n_layers, slots]`.
        even: True where the heads are evenly spaced, bool `[n_layers, slots]`.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        rows: Sequence[int],
        dtype: torch.dtype,
        devices: Sequence[torch.device],
    ) -> None:
        """Allocate the tensors; rows: rows per head of each layer; devices: of each layer."""
        self.shape = shape
        self.slots = slots
        self.dtype = dtype
        distinct = list(dict.fromkeys(devices))
        self.home = [distinct.index(device) for device in devices]
        self.memories = [
            PoolMemory.allocate(
                slots,
                shape.n_kv_heads
                * sum(n for n, own in zip(rows, devices, strict=True) if own == device),
                shape.head_dim,
                dtype,
                device,
                latent=shape.latent,
            )
            for device in distinct
        ]
        self.lengths = torch.zeros(shape.n_layers, slots, shape.n_kv_heads, dtype=torch.int64)
        self.starts = torch.zeros_like(self.lengths)
        self.widths = torch.zeros(shape.n_layers, slots, dtype=torch.int64)
        self.regions = torch.zeros_like(self.widths)
        self.even = torch.ones(shape.n_layers, slots, dtype=torch.bool)

    def get_memory(self, layer: int) -> PoolMemory:
        """Get the tensors of a layer's device."""
        return self.memories[self.home[layer]]

    def list_layers(self, memory: int) -> list[int]:
        """List the layers of a memory."""
        return [layer for layer, home in enumerate(self.home) if home == memory]

    def has_room(self, widths: Sequence[int]) -> bool:
        """Check if each device's slots have room for so many rows per head of its layers."""
        return all(
            self.shape.n_kv_heads * sum(widths[layer] for layer in self.list_layers(index))
            <= memory.capacity
            for index, memory in enumerate(self.memories)
        )

    def divide(self, slot: int, widths: Sequence[int]) -> None:
        """Divide an empty slot: layer l gets `n_kv_heads * widths[l]` rows."""
        heads = self.shape.n_kv_heads
        assert self.has_room(widths), "more rows than a slot's capacity"
        assert not self.lengths[:, slot].any(), "only an empty slot is divided"
        width = torch.tensor(widths)
        self.widths[:, slot] = width
        for memory in range(len(self.memories)):
            layers = self.list_layers(memory)
            own = width[layers]
            self.regions[layers, slot] = heads * (own.cumsum(0) - own)
        self.starts[:, slot] = self.regions[:, slot, None] + width[:, None] * torch.arange(heads)
        self.even[:, slot] = True

    def clear(self, slot: int) -> None:
        """Drop every row of the slot.

        Keys and values are zeroed too: attention multiplies masked rows by 0, and a NaN that a
        session left behind (a NaN times 0 is a NaN) must not reach the next one.
        """
        self.lengths[:, slot] = 0
        for memory in self.memories:
            memory.clear(slot)

    def read(self, slot: int, layer: int) -> KVRows:
        """Read the rows of one layer: views if its heads are evenly spaced, else copies."""
        lengths = self.lengths[layer, slot]
        n = int(lengths.max())
        if self.even[layer, slot]:
            return KVRows(*(heads[:, :n] for heads in self._heads(slot, layer)))
        indices, resident = self.row_indices(layer, self.starts[layer, slot], lengths, n)
        tensors = self.get_memory(layer).tensors()
        return KVRows(*(tensor[slot, indices] for tensor in tensors)).masked(resident)

    def write(self, slot: int, layer: int, rows: KVRows, lengths: Tensor) -> None:
        """Replace the layer's rows by copies of `rows`; lengths: int64 `[n_kv_heads]`."""
        n = int(lengths.max())
        width = int(self.widths[layer, slot])
        self.lengths[layer, slot] = lengths
        if n > width:
            self._write_unevenly(slot, layer, rows)
            return
        self._clear_metadata(slot, layer)
        self.even[layer, slot] = True
        self.starts[layer, slot] = self.regions[layer, slot] + width * torch.arange(
            self.shape.n_kv_heads
        )
        for heads, new in zip(self._heads(slot, layer), rows.tensors(), strict=True):
            heads[:, :n] = new[:, :n]

    def accumulate(self, slot: int, layer: int, amounts: Tensor) -> None:
        """Add float32 `[n_kv_heads, n]` to the accumulated sums of the rows that `read` returns."""
        lengths = self.lengths[layer, slot]
        starts = self.starts[layer, slot]
        indices, resident = self.row_indices(layer, starts, lengths, int(lengths.max()))
        memory = self.get_memory(layer)
        amounts = memory.send(amounts) * resident
        memory.accumulated[slot].index_put_((indices,), amounts, accumulate=True)

    def reserve(self, slots: list[int], lengths: Tensor) -> None:
        """Space heads unevenly where they cannot grow to `lengths` in place.

        lengths: int64 `[n_layers, B, n_kv_heads]`.
        """
        too_long = self.even[:, slots] & (lengths.amax(-1) > self.widths[:, slots])
        for layer, index in too_long.nonzero().tolist():
            self._write_unevenly(slots[index], layer, self.read(slots[index], layer))

    def row_indices(
        self, layer: int, starts: Tensor, lengths: Tensor, n: int
    ) -> tuple[Tensor, Tensor]:
        """Indices of a layer's heads' first `n` rows within their slots, and a mask of the resident ones.

        starts, lengths: int64 `[..., n_kv_heads]`. Returns int64 and bool `[..., n_kv_heads, n]` on
        the layer's device. Where there is no row, an index of the same slot is given: the head's
        last one, which holds no other session's NaN. An empty head may start where the slot ends.
        """
        count = torch.arange(n, device=starts.device)
        resident = count < lengths[..., None]
        indices = starts[..., None] + torch.minimum(count, (lengths[..., None] - 1).clamp(min=0))
        memory = self.get_memory(layer)
        return memory.send(indices.clamp(max=memory.capacity - 1)), memory.send(resident)

    def _write_unevenly(self, slot: int, layer: int, rows: KVRows) -> None:
        """Give each head its length and an even share of the layer's free rows."""
        heads = self.shape.n_kv_heads
        lengths = self.lengths[layer, slot]
        share = int(self.widths[layer, slot]) - -(-int(lengths.sum()) // heads)
        assert share >= 0, "the bound was checked before"
        widths = lengths + share
        self.starts[layer, slot] = self.regions[layer, slot] + widths.cumsum(0) - widths
        self.even[layer, slot] = False
        resident = rows.positions != EMPTY
        starts = self.starts[layer, slot]
        indices, _ = self.row_indices(layer, starts, lengths, resident.shape[1])
        # Copies before anything is written: source and destination may overlap.
        copies = [tensor[resident] for tensor in rows.tensors()]
        self._clear_metadata(slot, layer)
        for tensor, new in zip(self.get_memory(layer).tensors(), copies, strict=True):
            tensor[slot, indices[resident]] = new

    def _clear_metadata(self, slot: int, layer: int) -> None:
        """Mark every row of the layer as empty; keys and values stay."""
        region = self._region(slot, layer)
        memory = self.get_memory(layer)
        memory.positions[slot, region] = EMPTY
        memory.promoted[slot, region] = False
        memory.accumulated[slot, region] = 0

    def _region(self, slot: int, layer: int) -> slice:
        """Indices of a layer's rows within the slot, those without a row included."""
        start = int(self.regions[layer, slot])
        return slice(start, start + self.shape.n_kv_heads * int(self.widths[layer, slot]))

    def _heads(self, slot: int, layer: int) -> Iterator[Tensor]:
        """Views of the tensors' rows of a layer with even heads, `[n_kv_heads, width, ...]`."""
        region = self._region(slot, layer)
        heads = self.shape.n_kv_heads
        return (
            tensor[slot, region].view(heads, -1, *tensor.shape[2:])
            for tensor in self.get_memory(layer).tensors()
        )
