"""One forward pass over slots: the cache that transformers reads and appends to."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvrecall.metrics.page import Metrics
from workers.cache.active_cache import EMPTY, ActiveCache

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
        scale: float | None,
    ) -> Tensor | None:
        """Attend in one layer; None where attention to the active rows is to run.

        query: `[1, n_heads, t, head_dim]`; key, value: `[1, n_kv_heads, n, head_dim]`; positions:
        int32 `[1, n_kv_heads, n]`, `EMPTY` where there is no row; scale None: head_dim ** -0.5.
        Returns `[1, n_heads, t, head_dim]`.
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
        scale: float | None,
    ) -> Tensor:
        """Attend in one layer to active rows and others; see `workers.retrieval.step.RetrievalStep`."""

    def measure(self, metrics: Metrics) -> None:
        """Add the pass, once it is over, to the worker's metrics."""


class ForwardStep(Cache):
    """One forward pass: the cache that transformers uses, for B slots with t new tokens each.

    What the control flow needs is decided on the host when the step is made. The pass itself is a
    function of two tensors on the device, `query_positions` and `control`: no operation of it waits
    for the device, and a graph that was captured of it serves every step of the same shapes.

    New tokens come after all rows of their slots; what a query may see follows from lengths alone.

    Attributes:
        query_positions: True positions of the new tokens, int32 `[B, t]`.
        control: Each head's first row in the flattened pool, and its length before the step, int64
            `[2, n_layers, B, n_kv_heads]`.
        new_keys: After the pass, the new keys per layer, `[B, n_kv_heads, t, head_dim]`, for the
            row store.
        new_values: As `new_keys`.
        observed: After the pass, the post-RoPE queries of the last `observe` tokens per layer,
            `[B, n_heads, observe, head_dim]`.
        block_attention: What attends in place of attention to the active rows; None, unless it is set
            before the pass.
        retrieval: What adds rows to the active ones; None, unless it is set before the pass.
    """

    def __init__(
        self,
        cache: ActiveCache,
        slots: Sequence[int],
        query_positions: Tensor,
        observe: int = 0,
        *,
        static: bool = False,
    ) -> None:
        """Reserve rows for the new tokens; query_positions: int `[B, t]`, after the slots' rows.

        A `static` step reads some rows more than its slots hold, and masks them, so that the next
        steps have its shapes.
        """
        super().__init__(layers=[])
        assert len(set(slots)) == len(slots), "a slot occurs once in a step"
        self.cache = cache
        self.observe = observe
        self.slot_list = list(slots)
        self.static = static
        self.block_attention: BlockAttention | None = None
        self.retrieval: RowRetrieval | None = None
        self.query_positions = query_positions.to(cache.device, torch.int32, non_blocking=True)
        self.control = self._reserve(query_positions.shape[1])
        self._mask: tuple[int, Tensor] | None = None  # and the first layer that it was made for
        self._begin()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append layer `layer_idx`'s new rows and return all rows that it may attend to.

        key_states, value_states: `[B, n_kv_heads, t, head_dim]`. Returns keys and values
        `[B, n_kv_heads, n, head_dim]`, n the longest head of the batch or, in a static step, more.
        They are views if the slots are adjacent and have their heads at the same indices, else
        copies.
        """
        pool = self.cache.pool
        new = self._new_indices[layer_idx].flatten()
        for rows, added in ((pool.keys, key_states), (pool.values, value_states)):
            flat = added.to(self.cache.dtype).reshape(-1, added.shape[-1])
            rows.flatten(0, 1).index_copy_(0, new, flat)
        self.new_keys.append(key_states)
        self.new_values.append(value_states)
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
        if tokens == 1 and same and not self.static:
            return None
        first = self._first_alike[layer_idx]
        if self._mask is None or self._mask[0] != first:
            before = self.control[1, layer_idx, :1, :1] if same else self.control[1, layer_idx]
            group = self.cache.shape.group if tokens > 1 else 1
            last = before[..., None] + torch.arange(tokens, device=before.device).repeat(group)
            indices = torch.arange(self._rows[layer_idx], device=before.device)
            hidden = indices > last[..., None]
            self._mask = (
                first,
                torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf),
            )
        return self._mask[1]

    def positions(self, layer_idx: int) -> Tensor:
        """True positions of the rows that `update` returned, int32 `[B, n_kv_heads, n]`.

        `EMPTY` behind the ends of shorter heads.
        """
        positions = self.cache.pool.positions
        if (window := self._windows[layer_idx]) is not None:
            return self._view(positions, layer_idx, window)
        indices = self._flat_indices(layer_idx)
        lengths = self.control[1, layer_idx, ..., None] + self.query_positions.shape[1]
        resident = torch.arange(indices.shape[-1], device=indices.device) < lengths
        return positions.flatten()[indices].masked_fill(~resident, EMPTY)

    def record(self, queries: Tensor) -> None:
        """Record a layer's last `observe` queries of `[B, n_heads, t, head_dim]`."""
        if self.observe:
            last = queries[:, :, -self.observe :].detach()
            # A copy of a part, so that the whole is not kept.
            self.observed.append(last if self.observe == queries.shape[2] else last.clone())

    @cached_property
    def rows(self) -> Tensor:
        """All new rows after the pass, `[B, n_layers, 2, n_kv_heads, t, head_dim]`."""
        pairs = zip(self.new_keys, self.new_values, strict=True)
        rows = torch.stack([rows for pair in pairs for rows in pair], dim=1)
        return rows.view(len(rows), -1, 2, *rows.shape[2:])

    @cached_property
    def observed_queries(self) -> Tensor:
        """All observed queries after the pass, `[B, n_layers, n_heads, observe, head_dim]`."""
        return torch.stack(self.observed, dim=1)

    def rebind(self, query_positions: Tensor, control: Tensor) -> "ForwardStep":
        """The same pass over other tensors of these shapes: the inputs of a captured graph."""
        step = copy(self)
        step.query_positions = query_positions
        step.control = control
        step._begin()
        return step

    def undo(self) -> None:
        """Drop the new rows from the slots, in whatever layer the pass has failed or ended."""
        for slot in self.slot_list:
            self.cache.drop_last(slot, self.query_positions.shape[1])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows of the longest head of the batch; positions are passed explicitly."""
        return self._rows[layer_idx]

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
        offsets = pool.capacity * torch.tensor(self.slot_list)[:, None]
        starts = pool.starts[:, self.slot_list] + offsets
        return torch.stack([starts, before]).to(cache.device, non_blocking=True)

    def _begin(self) -> None:
        """Begin the pass: all that it computes once for all layers."""
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []
        self.observed: list[Tensor] = []
        self._mask = None
        starts, before = self.control
        tokens = self.query_positions.shape[1]
        self._new_indices = (starts + before)[..., None] + torch.arange(
            tokens, device=starts.device
        )
        positions = self.query_positions[:, None].expand(self._new_indices.shape)
        self.cache.pool.positions.view(-1).index_copy_(
            0, self._new_indices.flatten(), positions.flatten()
        )

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
        first = [0]
        for layer, differs in enumerate(changed, start=1):
            differs = differs or self._rows[layer] != self._rows[layer - 1]
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
        starts, before = self.control[:, layer, ..., None]
        last = before + self.query_positions.shape[1] - 1
        count = torch.arange(self._rows[layer], device=starts.device)
        indices: Tensor = starts + torch.minimum(count, last)
        return indices
