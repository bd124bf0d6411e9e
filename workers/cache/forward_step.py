"""One forward pass over slots: the cache that transformers reads and appends to."""

from collections.abc import Hashable, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, LinearAttentionLayer

from kvrecall.metrics.page import Metrics
from workers.cache.active_cache import EMPTY, ActiveCache
from workers.cache.layer_plan import LayerPlan
from workers.cache.logits import Logits
from workers.cache.row_packing import RowPacking
from workers.cache.side_cache import SideCache
from workers.cache.window import Window
from workers.positions.placement import Placement

# Rows that a static step's reads are a multiple of: as many steps share their shapes.
_STATIC_ROWS = 256


class BlockAttention(Protocol):
    """Attention of one block's queries that a step runs in place of that to its active rows."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        logits: Logits,
    ) -> Tensor | None:
        """Attend in one layer; None where attention to the active rows is to run.

        query: `[1, n_heads, t, head_dim]`; key, value: `[1, n_kv_heads, n, head_dim]`; positions:
        int32 `[1, n_kv_heads, n]`, `EMPTY` where there is no row. Returns `[1, n_heads, t,
        head_dim]`.
        """

    def measure(self, metrics: Metrics) -> None:
        """Add the pass, once it is over, to the worker's metrics."""


class RowRetrieval(Protocol):
    """A step's retrieval: rows that are not active, but that it attends to as well."""

    def attend(
        self,
        layer: int,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        logits: Logits,
    ) -> Tensor:
        """Attend in one layer to active rows and others; see `workers.retrieval.step.RetrievalStep`."""

    def measure(self, metrics: Metrics) -> None:
        """Add the pass, once it is over, to the worker's metrics."""


class ForwardStep(Cache):
    """One forward pass: the cache that transformers uses, for B slots with t new tokens each.

    What the control flow needs is decided on the host when the step is made. The pass itself is a
    function of two tensors on the device, `query_positions` and `control`: no operation of it waits
    for the device, and a graph that was captured of it serves every step of the same shapes. Layers on
    other devices have copies of both there.

    New tokens come after all rows of their slots; what a query may see follows from lengths alone.

    Attributes:
        query_positions: True positions of the new tokens, int32 `[B, t]`.
        control: Each head's first row in the flattened pool, and its length before the step, int64
            `[2, n_layers, B, n_kv_heads]`.
        new_keys: After the pass, the new keys per layer, `[B, n_kv_heads, t, head_dim]`, for the
            row store.
        new_values: As `new_keys`.
        observed: After the pass, the post-RoPE queries of the last `observe` tokens per layer,
            `[B, n_heads, observe, head_dim]`, in the scale of `head_dim ** -0.5`.
        block_attention: What attends in place of attention to the active rows; None, unless it is set
            before the pass.
        retrieval: What adds rows to the active ones; None, unless it is set before the pass.
        placement: Where tokens and rows are for the model; None, unless it is set before the pass: at
            their true positions.
        windows: The same pass over the rows of layers with windows; None without such layers.
    """

    def __init__(
        self,
        cache: ActiveCache,
        slots: Sequence[int],
        query_positions: Tensor,
        observe: int = 0,
        *,
        static: bool = False,
        side: SideCache | None = None,
        reach: Sequence[Window] = (),
    ) -> None:
        """Reserve rows for the new tokens; query_positions: int `[B, t]`, after the slots' rows.

        A `static` step reads some rows more than its slots hold, and masks them, so that the next
        steps have its shapes. side: of a model with layers that keep other things than managed rows.
        reach: of each layer of windows; empty where every query sees all rows.
        """
        super().__init__(layers=[])
        assert len(set(slots)) == len(slots), "a slot occurs once in a step"
        self.cache = cache
        self.observe = observe
        self.slot_list = list(slots)
        self.static = static
        self.block_attention: BlockAttention | None = None
        self.retrieval: RowRetrieval | None = None
        self.placement: Placement | None = None
        self.query_positions = query_positions.to(cache.device, torch.int32, non_blocking=True)
        self.control = self._reserve(query_positions.shape[1])
        # By the first layer of those that share one, and by their reach.
        self._masks: dict[tuple[int, Window | None], Tensor] = {}
        self._reach = tuple(reach)
        self._side = side
        self._plan: LayerPlan | None = None
        self._recurrent: dict[int, LinearAttentionLayer] = {}
        self._computed: Tensor | None = None
        self.windows: ForwardStep | None = None
        if side is not None:
            self._begin_side(side)
        self._begin()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append the new rows of the model's layer `layer_idx`; returns all that it may attend to.

        key_states, value_states: `[B, n_kv_heads, t, head_dim]`; of latents the latent and the
        rotated key. Returns keys and values `[B, n_kv_heads, n, head_dim]`, n the longest head of the
        batch or, in a static step, more; values that are narrower are padded. They are views if the
        slots are adjacent and have their heads at the same indices, else copies.
        """
        part, layer = self.find(layer_idx)
        shape = part.cache.shape
        if shape.latent:
            key_states = value_states = torch.cat([key_states, value_states], -1)
        elif value_states.shape[-1] < shape.head_dim:
            value_states = pad(value_states, (0, shape.head_dim - value_states.shape[-1]))
        return part._append(key_states, value_states, layer)

    @property
    def places(self) -> Tensor:
        """At which the model computes the new tokens, int32 `[B, t]`."""
        return self.query_positions if self.placement is None else self.placement.query_positions

    def find(self, layer_idx: int) -> tuple["ForwardStep", int]:
        """Find the part of the pass, and the layer in it, whose rows the model's layer attends to."""
        if self._plan is None:
            return self, layer_idx
        owner = self._plan.shared.get(layer_idx, layer_idx)
        if owner in self._row_layers:
            return self, self._row_layers[owner]
        assert self.windows is not None, "a layer that attends has rows, or a window of them"
        return self.windows, self._window_layers[owner]

    def owns_rows(self, layer_idx: int) -> bool:
        """Check if the model's layer attends to rows of its own."""
        return self._plan is None or layer_idx not in self._plan.shared

    def _append(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's rows; returns as `update`."""
        pool = self.cache.pool.get_memory(layer_idx)
        new = self._new_indices[layer_idx].flatten()
        for rows, added in ((pool.keys, key_states), (pool.values, value_states)):
            flat = added.to(self.cache.dtype).reshape(-1, added.shape[-1])
            rows.flatten(0, 1).index_copy_(0, new, flat)
        self.new_keys.append(self.bring(key_states))
        self.new_values.append(self.bring(value_states))
        if (window := self._windows[layer_idx]) is not None:
            keys = self._view(pool.keys, layer_idx, window)
            return keys, self._view(pool.values, layer_idx, window)
        indices = self._flat_indices(layer_idx)
        # Row by row from the whole pool: several times as fast as indexing slots and rows.
        shape = (*indices.shape, self.cache.shape.head_dim)
        keys, values = (
            rows.flatten(0, 1).index_select(0, indices.flatten()).view(shape)
            for rows in (pool.keys, pool.values)
        )
        return keys, values

    def mask(self, layer_idx: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the attention logits of a layer: 0, or -inf where a query may not see.

        For queries `[B, n_kv_heads, group * t, head_dim]` over the rows that `update` returned.
        Adjacent layers of the same lengths share one. None if every query sees every row: single
        tokens, and heads of one length.
        """
        same = self._same_lengths[layer_idx]
        tokens = self.query_positions.shape[1]
        reach = self._reach[layer_idx] if self._reach else None
        if tokens == 1 and same and not self.static and reach is None:
            return None
        key = (self._first_alike[layer_idx], reach)
        if key not in self._masks:
            self._masks.clear()  # layers come in order
            hidden = self._hide_later(layer_idx) if reach is None else self._hide(layer_idx, reach)
            mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self._masks[key] = mask
        return self._masks[key]

    def _hide_later(self, layer: int) -> Tensor:
        """Find the rows behind a query's own: bool `[B, n_kv_heads, group * t, n]`, or broadcast to it."""
        tokens = self.query_positions.shape[1]
        same = self._same_lengths[layer]
        control = self._control_of(layer)
        before = control[1, :1, :1] if same else control[1]
        group = self.cache.shape.group if tokens > 1 else 1
        last = before[..., None] + torch.arange(tokens, device=before.device).repeat(group)
        return torch.arange(self._rows[layer], device=before.device) > last[..., None]

    def _hide(self, layer: int, reach: Window) -> Tensor:
        """Find the rows outside of a query's reach, alike in all heads: `[B, 1, group * t, n]`."""
        group = self.cache.shape.group if self.query_positions.shape[1] > 1 else 1
        rows = self.positions(layer)[:, :1, None]
        queries = self._queries[self.cache.pool.home[layer]][:, None, :, None]
        hidden = (rows > queries) | (rows < reach.first_seen(queries))
        return hidden.repeat(1, 1, group, 1)

    def positions(self, layer_idx: int) -> Tensor:
        """True positions of the rows that `update` returned, int32 `[B, n_kv_heads, n]`.

        `EMPTY` behind the ends of shorter heads.
        """
        positions = self.cache.pool.get_memory(layer_idx).positions
        if (window := self._windows[layer_idx]) is not None:
            return self._view(positions, layer_idx, window)
        indices = self._flat_indices(layer_idx)
        lengths = self._control_of(layer_idx)[1, ..., None] + self.query_positions.shape[1]
        resident = torch.arange(indices.shape[-1], device=indices.device) < lengths
        return positions.flatten()[indices].masked_fill(~resident, EMPTY)

    def take(self, rows: Tensor, queries: Tensor | None) -> None:
        """Take the results of a pass that native code has computed, and whose rows it has written to the slots.

        rows: as `rows`; queries: of single tokens, `[n_layers, B, n_heads, 1, head_dim]`, for `observed`.
        """
        self._computed = rows
        if queries is not None:
            self.observed.extend(queries)

    def record(self, queries: Tensor) -> None:
        """Record a layer's last `observe` queries of `[B, n_heads, t, head_dim]`."""
        if self.observe:
            last = self.bring(queries[:, :, -self.observe :].detach())
            # A copy of a part, so that the whole is not kept.
            self.observed.append(last if self.observe == queries.shape[2] else last.clone())

    def bring(self, tensor: Tensor) -> Tensor:
        """Copy what a layer computed to the device of work on all layers, unless it is there."""
        return tensor.to(self.cache.device, non_blocking=True)

    @cached_property
    def rows(self) -> Tensor:
        """All new rows after the pass, `[B, n_layers, parts, n_kv_heads, t, head_dim]`.

        Those of windows come behind the others, as further layers (`RowPacking`).
        """
        if self._computed is not None:
            return self._computed
        parts = (self.new_keys,) if self.cache.shape.latent else (self.new_keys, self.new_values)
        rows = torch.stack([torch.stack(part, dim=1) for part in parts], dim=2)
        if self.windows is None:
            return rows
        packing = RowPacking(self.windows.cache.shape, self.cache.shape)
        packed = torch.stack([packing.pack(each) for each in self.windows.rows])
        return torch.cat([rows, self.bring(packed)], dim=1)

    @cached_property
    def observed_queries(self) -> Tensor:
        """All observed queries after the pass, `[B, n_layers, n_heads, observe, head_dim]`."""
        return torch.stack(self.observed, dim=1)

    @property
    def has_rows_alone(self) -> bool:
        """True for a model whose layers all keep managed rows."""
        return self._side is None

    @property
    def shapes(self) -> Hashable:
        """What a captured graph of the pass depends on beside what is in its inputs.

        The graph of a pass computes every other one whose shapes are equal to its.
        """
        return (
            self.observe,
            tuple(self.slot_list),
            tuple(memory.keys.data_ptr() for memory in self.cache.pool.memories),
            tuple(self._windows),
            tuple(self._rows),
            tuple(self._same_lengths),
            tuple(self._first_alike),
        )

    def rebind(self, query_positions: Tensor, control: Tensor) -> "ForwardStep":
        """The same pass over other tensors of these shapes: the inputs of a captured graph."""
        assert self._side is None, "passes of such models are not captured"
        step = copy(self)
        step.query_positions = query_positions
        step.control = control
        step._begin()
        return step

    @property
    def recurrent_states(self) -> list[tuple[Tensor, Tensor]] | None:
        """Last inputs of the convolution and the recurrence, `[B, ...]`, of each layer with such states.

        They are the pass's own, which changes them in place, and `commit` keeps them. None where a layer has
        others, or none yet.
        """
        found = []
        for _, layer in sorted(self._recurrent.items()):
            inputs, sums = layer.conv_states[0], layer.recurrent_states[0]
            if layer.number_of_states > 1 or inputs is None or sums is None:
                return None
            found.append((inputs, sums))
        return found

    def undo(self) -> None:
        """Drop the new rows from the slots, in whatever layer the pass has failed or ended."""
        for slot in self.slot_list:
            self.cache.drop_last(slot, self.query_positions.shape[1])
        if self.windows is not None:
            self.windows.undo()

    def commit(self) -> None:
        """Keep the recurrent states that the pass has come to; without it they stay as they were."""
        if self._side is not None and self._side.states is not None:
            self._side.states.keep(self._recurrent, self.slot_list)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows of the longest head of the batch; positions are passed explicitly."""
        return max(self._rows)

    def _begin_side(self, side: SideCache) -> None:
        """Begin the pass over the layers that keep other things than managed rows."""
        plan = self._plan = side.shape.plan
        self._row_layers = {layer: i for i, layer in enumerate(plan.rows)}
        self._window_layers = {layer: i for i, layer in enumerate(plan.windows)}
        if side.windows is not None:
            self.windows = ForwardStep(
                side.windows,
                self.slot_list,
                self.query_positions,
                static=self.static,
                reach=side.reach,
            )
        if side.states is not None:
            self._recurrent = side.states.begin(plan, self.slot_list)
            self.layers: list[Any] = [self._recurrent.get(i) for i in range(plan.n_layers)]

    def _reserve(self, tokens: int) -> Tensor:
        """Reserve `tokens` rows in every head, and decide on the host what the pass will read.

        Returns `control`: one transfer for all layers.
        """
        cache = self.cache
        pool = cache.pool
        before = cache.lengths[:, self.slot_list]
        lengths = before + tokens
        cache.require_bound(slice(None), self.slot_list, lengths)
        pool.reserve(self.slot_list, lengths)
        cache.lengths[:, self.slot_list] = lengths
        self._windows = self._find_windows()
        self._rows = self._count_rows(lengths)
        self._same_lengths = (before == before[:, :1, :1]).all(2).all(1).tolist()
        self._first_alike = self._find_alike(before)
        capacities = [pool.get_memory(layer).capacity for layer in range(len(pool.home))]
        offsets = torch.tensor(capacities)[:, None, None] * torch.tensor(self.slot_list)[:, None]
        starts = pool.starts[:, self.slot_list] + offsets
        return torch.stack([starts, before]).to(cache.device, non_blocking=True)

    def _begin(self) -> None:
        """Begin the pass: all that it computes once for all layers."""
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []
        self.observed: list[Tensor] = []
        self._computed = None
        self._masks = {}
        pool = self.cache.pool
        # Of each device; on the first one these are the tensors themselves.
        self._controls = [memory.send(self.control) for memory in pool.memories]
        self._queries = [memory.send(self.query_positions) for memory in pool.memories]
        self._new_indices: dict[int, Tensor] = {}
        for index, memory in enumerate(pool.memories):
            layers = pool.list_layers(index)
            control = self._controls[index]
            starts, before = control if len(pool.memories) == 1 else control[:, layers]
            queries = self._queries[index]
            new = (starts + before)[..., None] + torch.arange(
                queries.shape[1], device=memory.device
            )
            positions = queries[:, None].expand(new.shape)
            memory.positions.view(-1).index_copy_(0, new.flatten(), positions.flatten())
            self._new_indices |= zip(layers, new, strict=True)

    def _control_of(self, layer: int) -> Tensor:
        """Read a layer's part of `control` on its device, int64 `[2, B, n_kv_heads]`."""
        return self._controls[self.cache.pool.home[layer]][:, layer]

    def _find_windows(self) -> list[tuple[int, int] | None]:
        """Per layer the region's first index and a head's width, if rows can be read as a view.

        They can if the slots are adjacent and their regions and widths are the same.
        """
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

    def _count_rows(self, lengths: Tensor) -> list[int]:
        """Rows that are read of each head, per layer; lengths: int64 `[n_layers, B, heads]`."""
        longest: list[int] = lengths.amax((1, 2)).tolist()
        if not self.static:
            return longest
        rounded = [-(-n // _STATIC_ROWS) * _STATIC_ROWS for n in longest]
        return [
            rows if window is None else min(rows, window[1])
            for rows, window in zip(rounded, self._windows, strict=True)
        ]

    def _find_alike(self, before: Tensor) -> list[int]:
        """Per layer the first of the adjacent layers with its lengths and rows: they share a mask."""
        changed = (before[1:] != before[:-1]).flatten(1).any(1).tolist()
        home = self.cache.pool.home
        first = [0]
        for layer, differs in enumerate(changed, start=1):
            differs = differs or self._rows[layer] != self._rows[layer - 1]
            differs = differs or home[layer] != home[layer - 1]
            first.append(layer if differs else first[-1])
        return first

    def _view(self, tensor: Tensor, layer: int, window: tuple[int, int]) -> Tensor:
        region, width = window
        heads = self.cache.shape.n_kv_heads
        first = self.slot_list[0]
        run = tensor[first : first + len(self.slot_list), region : region + heads * width]
        return run.view(len(run), heads, width, *tensor.shape[2:])[:, :, : self._rows[layer]]

    def _flat_indices(self, layer: int) -> Tensor:
        """Indices of rows in the flattened pool, int64 `[B, n_kv_heads, n]`.

        Behind a head's end its last row's, which holds no other session's NaN.
        """
        starts, before = self._control_of(layer)[..., None]
        last = before + self.query_positions.shape[1] - 1
        count = torch.arange(self._rows[layer], device=starts.device)
        indices: Tensor = starts + torch.minimum(count, last)
        return indices
