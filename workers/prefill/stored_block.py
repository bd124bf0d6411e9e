"""One prefilled block that attends to every stored row of its session, read layer by layer."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvrecall.metrics.page import Metrics
from workers.cache.logits import Logits, attend
from workers.cache.transfers import Transfers
from workers.positions.seen_rows import SeenRows

# Cells of a mask: queries of a KV head times rows.
_MASK_CELLS = 2**24

# A layer -> keys and values of all rows from before the block on the host, `[n_kv_heads, m, head_dim]`, each in
# parts that follow each other.
ReadRows = Callable[[int], tuple[list[Tensor], list[Tensor]]]
# A layer, and the block's own keys and values `[n_kv_heads, t, head_dim]` on the device -> those of all
# rows, the block's at the end, in new memory of the device.
JoinRows = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def concatenate(read: ReadRows, transfers: Transfers) -> JoinRows:
    """Join rows that are read from the host with those of a block: on a CPU in one copy."""

    def append(parts: list[Tensor], own: Tensor) -> Tensor:
        before = parts if own.device.type == "cpu" else transfers.to_device([torch.cat(parts, 1)])
        return torch.cat([*(each.to(own.dtype) for each in before), own], 1)

    def join(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = read(layer)
        return append(stored[0], keys), append(stored[1], values)

    return join


class StoredBlock:
    """Attention of one block to all rows of its session, as `ForwardStep.block_attention`.

    Its own rows come out as those of a full cache, whatever is active. Beside the active rows the
    device holds one layer's rows at a time.
    """

    def __init__(self, first: int, join: JoinRows, seen: SeenRows | None = None) -> None:
        """Begin a block; `first` is the position of its first token. `join` may raise errors of reads.

        seen: how the block sees the rows before it, of a session behind the model's window.
        """
        self._first = first
        self._join = join
        self._seen = seen
        self._mask: Tensor | None = None
        self._hidden = range(0)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        logits: Logits,
    ) -> Tensor:
        """Attend in one layer; see `BlockAttention.attend`. Raises the errors of the read."""
        n_heads, tokens, head_dim = query.shape[1:]
        heads = key.shape[1]
        # A head's new rows are right behind its others. Counting these waits for no value of the device.
        others = (positions[0] < self._first).sum(1, keepdim=True)
        own = (others + torch.arange(tokens, device=others.device))[..., None].expand(
            -1, -1, head_dim
        )
        keys, values = self._join(layer, key[0].gather(1, own), value[0].gather(1, own))
        if self._seen is not None:
            self._seen.turn_run_in_place(layer, keys)
        grouped = query[0].view(heads, -1, tokens, head_dim)
        out = torch.empty_like(grouped)
        at_once = max(1, _MASK_CELLS // (n_heads // heads * keys.shape[1]))
        for start in range(0, tokens, at_once):
            tile = range(start, min(tokens, start + at_once))
            out[:, :, start : tile.stop] = attend(
                grouped[:, :, start : tile.stop].reshape(1, heads, -1, head_dim),
                keys[None],
                values[None],
                self._hide_later(tile, keys.shape[1], grouped),
                logits,
            ).view(heads, -1, len(tile), head_dim)
        return out.view(1, n_heads, tokens, head_dim)

    def measure(self, metrics: Metrics) -> None:
        """Add nothing: the block attends to every row."""

    def _hide_later(self, tile: range, length: int, grouped: Tensor) -> Tensor:
        """What is added to the logits of a tile's queries: -inf for rows after their own.

        All layers and tiles share its memory, of which only what the block's own rows get changes. grouped:
        `[n_kv_heads, group, t, head_dim]`. Returns `[group * len(tile), length]`.
        """
        rows = grouped.shape[1] * len(tile)
        if self._mask is None:
            # The first tile is the largest.
            self._mask = grouped.new_zeros(rows, length)
        mask = self._mask[:rows]
        if self._hidden != tile:
            own = torch.arange(length - self._first, device=grouped.device)
            later = own > own[tile.start : tile.stop, None]
            hidden = torch.zeros_like(later, dtype=mask.dtype).masked_fill_(later, -torch.inf)
            mask.view(-1, len(tile), length)[..., self._first :] = hidden
            self._hidden = tile
        return mask
