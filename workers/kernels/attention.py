"""Attention of a decode step over active and drawn rows, by kernels of a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from workers.cache.transfers import Transfers
from workers.kernels.operator import attend_drawn
from workers.kernels.searched_table import SearchedTable
from workers.native.attention import find_codes, find_parts
from workers.native.searched_rows import SearchedRows
from workers.parallel.alone import Alone
from workers.parallel.group import Group

# Wider keys leave no room for tiles of them in a multiprocessor.
_MOST_CHANNELS = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelAttention:
    """Four kernels a layer: search, draw and attention of all sessions and heads of a step.

    What is drawn, and how drawn rows count, is defined by `workers.retrieval.sampling`; the results are those of
    `workers.native.attention.NativeAttention`. Codes of keys are on the device. Pages are where it reads them by
    their addresses: in pinned memory of the host, or in its own.
    """

    def __init__(self, transfers: Transfers, rotations: int, group: Group = Alone()) -> None:
        """transfers: to the device. rotations: ranks are rotated by less than that.

        group: of the processes that have the other heads.
        """
        self._transfers = transfers
        self._rotations = rotations
        self._processes = group
        self._ranks = torch.empty(0, device=transfers.device)

    def takes(
        self,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        layout: PageLayout,
    ) -> bool:
        """True for arguments that `attend` computes: of one token, whose rows are stored as they are active."""
        keys, values, positions = rows
        return (
            queries.device == self._ranks.device
            and queries.dtype in _DTYPES
            and queries.dtype == keys.dtype == values.dtype == layout.dtype
            and queries.shape[3] <= _MOST_CHANNELS
            and all(map(_is_dense, (queries, keys, values)))
            and positions.stride(2) == 1
            and (mask is None or mask.shape[2:] == (1, keys.shape[2]))
        )

    def describe(self, searched: Sequence[SearchedRows | None]) -> SearchedTable:
        """Describe the rows of a pass's sessions to the device, before its layers.

        searched: of any layer, whose codes are on the device; None for a session that retrieves nothing.
        """
        ranks = max((each.ranks for each in searched if each is not None), key=len)
        if len(ranks) > len(self._ranks):
            [self._ranks] = self._transfers.to_device([ranks])
        return SearchedTable.build(searched, self._ranks, self._transfers)

    def attend(
        self,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        table: SearchedTable,
        *,
        layer: int,
        rotation: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attend to a layer's active rows, and to those that are drawn of each session's stored ones.

        Arguments and results as `NativeAttention.attend`, but for `table` and `layer` in place of the searched rows;
        positions are drawn in order. The host waits for nothing.
        """
        batch, heads, _, _ = queries.shape
        keys, values, positions = rows
        all_heads = heads * self._processes.count
        first = heads * self._processes.index
        added = None if mask is None else mask[:, :, 0].expand(batch, heads, keys.shape[2])
        out, drawn = attend_drawn(
            *(queries, keys, values, positions, added),
            *(table.described, table.ranks, table.pages, table.layout.page_tokens),
            *(table.width, table.most),
            list(find_codes(table.layout, layer)),
            list(find_parts(table.layout, layer)),
            [rotation, self._rotations, first, self._rotations // all_heads],
            scale,
        )
        return out, drawn


def _is_dense(rows: Tensor) -> bool:
    """True if each head's rows, `[..., n, head_dim]`, lie one after the other."""
    # torch gives a single row any stride.
    return rows.stride(3) == 1 and (rows.shape[2] == 1 or rows.stride(2) == rows.shape[3])
