"""One forward pass over slots: the cache that transformers reads and appends to."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from workers.cache.active_cache import EMPTY, ActiveCache


class ForwardStep(Cache):
    """One forward pass: the cache that transformers uses, for B slots with t new tokens each.

    New rows are appended to their slots as the layers run.

    Attributes:
        query_positions: True positions of the new tokens, int32 `[B, t]`.
        new_keys: After the pass, the new keys per layer, `[B, n_kv_heads, t, head_dim]`, for the
            row store.
        new_values: As `new_keys`.
        observed: After the pass, the post-RoPE queries of the last `observe` tokens per layer,
            `[B, n_heads, observe, head_dim]`.
    """

    def __init__(
        self,
        cache: ActiveCache,
        slots: Sequence[int],
        query_positions: Tensor,
        observe: int = 0,
    ) -> None:
        """Reserve rows for the new tokens; query_positions: int `[B, t]`."""
        super().__init__(layers=[])
        assert len(set(slots)) == len(slots), "a slot occurs once in a step"
        self.cache = cache
        self.observe = observe
        self.slot_list = list(slots)
        self.query_positions = query_positions.to(cache.device, torch.int32)
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []
        self.observed: list[Tensor] = []
        self._reserve(query_positions.shape[1])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append layer `layer_idx`'s new rows and return all rows that it may attend to.

        key_states, value_states: `[B, n_kv_heads, t, head_dim]`. Returns keys and values
        `[B, n_kv_heads, n, head_dim]`, n the longest head of the batch; `key_positions` has their
        positions. They are views if the slots are adjacent and have their heads at the same
        indices, else copies.
        """
        cache = self.cache
        pool = cache.pool
        cache.lengths[layer_idx, self.slot_list] = self._lengths[layer_idx]
        new = self._slots[:, None, None], self._new_indices[layer_idx]
        pool.keys[new] = key_states.to(cache.dtype)
        pool.values[new] = value_states.to(cache.dtype)
        pool.positions[new] = self.query_positions[:, None, :].expand(
            -1, cache.shape.n_kv_heads, -1
        )
        self.new_keys.append(key_states)
        self.new_values.append(value_states)
        if (window := self._windows[layer_idx]) is not None:
            keys = self._view(pool.keys, layer_idx, window)
            return keys, self._view(pool.values, layer_idx, window)
        indices, resident = self._flat_indices(layer_idx)
        # Row by row from the whole pool: several times as fast as indexing slots and rows.
        flat = indices.flatten()
        shape = (*resident.shape, cache.shape.head_dim)
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
        indices, resident = self._flat_indices(layer_idx)
        return torch.where(resident, positions.flatten()[indices], EMPTY)

    def record(self, queries: Tensor) -> None:
        """Record a layer's last `observe` queries of `[B, n_heads, t, head_dim]`."""
        if self.observe:
            self.observed.append(queries[:, :, -self.observe :].detach().clone())

    def rows(self, index: int) -> Tensor:
        """Stack the new rows of the step's `index`-th slot.

        Returns `[n_layers, 2, n_kv_heads, t, head_dim]`.
        """
        keys = torch.stack([keys[index] for keys in self.new_keys])
        values = torch.stack([values[index] for values in self.new_values])
        return torch.stack([keys, values], dim=1)

    def undo(self) -> None:
        """Drop the new rows from the slots, in whatever layer the pass has failed or ended."""
        cache = self.cache
        cache.lengths[:, self.slot_list] = self._lengths
        for slot in self.slot_list:
            cache.drop_last(slot, self.query_positions.shape[1])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows of the longest head of the batch; positions are passed explicitly."""
        return int(self.cache.lengths[layer_idx, self.slot_list].max())

    def _reserve(self, tokens: int) -> None:
        """Reserve `tokens` rows in every head, and compute their indices for all layers."""
        cache = self.cache
        before = cache.lengths[:, self.slot_list]
        self._lengths = before + tokens
        cache.require_bound(slice(None), self.slot_list, self._lengths)
        cache.pool.reserve(self.slot_list, self._lengths)
        self._longest: list[int] = self._lengths.amax((1, 2)).tolist()
        starts = cache.pool.starts[:, self.slot_list]
        # One transfer for all layers: [n_layers, B, n_kv_heads, t].
        self._new_indices = ((starts + before)[..., None] + torch.arange(tokens)).to(
            cache.device, non_blocking=True
        )
        self._slots = torch.tensor(self.slot_list, device=cache.device)
        self._windows = self._find_windows()
        if None in self._windows:
            self._starts = starts.to(cache.device)
            self._device_lengths = self._lengths.to(cache.device)

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

    def _view(self, tensor: Tensor, layer: int, window: tuple[int, int]) -> Tensor:
        region, width = window
        heads = self.cache.shape.n_kv_heads
        first = self.slot_list[0]
        run = tensor[first : first + len(self.slot_list), region : region + heads * width]
        return run.view(len(run), heads, width, *tensor.shape[2:])[:, :, : self._longest[layer]]

    def _flat_indices(self, layer: int) -> tuple[Tensor, Tensor]:
        """Indices of rows in the flattened pool, and a mask of the resident ones.

        Both `[B, n_kv_heads, n]`.
        """
        pool = self.cache.pool
        indices, resident = pool.row_indices(
            self._starts[layer], self._device_lengths[layer], self._longest[layer]
        )
        return indices + (self._slots * pool.capacity)[:, None, None], resident
