"""Stored rows of a pass's sessions, as the kernels read them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from workers.cache.transfers import Transfers
from workers.kernels.operator import SPLIT_ROWS
from workers.native.searched_rows import SearchedRows

# Places for addresses are a multiple of it: many steps share the shapes of what describes their rows.
_PAGES = 32


@dataclass(frozen=True, eq=False)
class SearchedTable:
    """Stored rows of the sessions of a pass, in all layers.

    Attributes:
        described: On the device, int64 `[sessions, 2 + 2 * pages]`: of each session how many rows it has, 0 for
            one that retrieves nothing, how many of them are drawn at most, the addresses of its pages and those
            of their codes.
        ranks: As `SearchedRows.ranks`, on the device.
        pages: Places for addresses.
        width: Rows for which there is a place, a multiple of `SPLIT_ROWS`.
        most: Rows that are drawn at most in any session.
        layout: Of the pages.
    """

    described: Tensor
    ranks: Tensor
    pages: int
    width: int
    most: int
    layout: PageLayout

    @property
    def shapes(self) -> Hashable:
        """What a captured graph depends on beside `described`: a table of equal ones may take its place."""
        ranks = self.ranks.data_ptr(), len(self.ranks)
        return ranks, self.described.shape, self.pages, self.width, self.most

    @classmethod
    def build(
        cls, searched: Sequence[SearchedRows | None], ranks: Tensor, transfers: Transfers
    ) -> "SearchedTable":
        """Build it in one copy to the device, for which the host does not wait.

        searched: of any layer; of one session at least. ranks: on the device, of the longest session's rows.
        """
        some = [each for each in searched if each is not None]
        layout = some[0].rows.layout
        pages = -(-max(len(each.codes) for each in some) // _PAGES) * _PAGES
        longest = pages * layout.page_tokens
        described = torch.zeros(len(searched), 2 + 2 * pages, dtype=torch.int64)
        for line, each in zip(described, searched, strict=True):
            if each is not None:
                line[0], line[1] = each.rows.length, each.count
                line[2 : 2 + len(each.codes)] = each.rows.addresses
                line[2 + pages : 2 + pages + len(each.codes)] = each.codes
        [on_device] = transfers.to_device([described])
        return cls(
            on_device,
            ranks,
            pages,
            -(-longest // SPLIT_ROWS) * SPLIT_ROWS,
            max(each.count for each in some),
            layout,
        )
