"""Summaries of a layer's keys: the mean and the variance of each 8, 64, 512 ... consecutive ones.

A node of level k has the keys `i * 8**k` to `(i + 1) * 8**k - 1`, and is there once all of them are; the
keys themselves are level 0. So nothing is clustered, and what there is follows from the keys alone,
not from the pieces in which they arrived.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvstore.errors import RowRangeError
from kvstore.format.page import PageLayout
from kvstore.index.arrays import append_behind, gather_runs, grown_bytes, reserve_behind

FANOUT = 8
"""Nodes of one level that a node of the next has."""

Fill = Callable[[Tensor, int, int], None]
"""Code that makes nodes: takes the memory for them, as `KeySummaries.describe` gives it, how many rows have nodes
already, and how many rows there are.
"""

# Nodes that are made at once: their members fit into a processor's cache.
_AT_ONCE = 128


class KeySummaries:
    """The summaries of one session's layer, in all of its KV heads, on the host."""

    def __init__(self) -> None:
        self._rows = 0
        self._heads = 0
        # Of each level from 1 on: means, then variances; float32 [n_kv_heads, capacity, 2 d].
        self._levels: list[Tensor] = []

    @property
    def rows(self) -> int:
        """Rows per KV head that are summarised, but for those that fill no node yet."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with what is reserved."""
        return sum(level.nbytes for level in self._levels)

    @staticmethod
    def bytes_for(layout: PageLayout, rows: int) -> int:
        """Most bytes of the summaries of one layer with so many rows per KV head."""
        node_bytes = layout.n_kv_heads * 2 * layout.head_dim * torch.float32.itemsize
        total = 0
        while rows := rows // FANOUT:
            total += grown_bytes((rows + FANOUT) * node_bytes)
        return total

    @property
    def needed_from(self) -> int:
        """First position whose key is needed to summarise more rows: that of the run that is not full yet."""
        return self._rows // FANOUT * FANOUT

    def count(self, level: int) -> int:
        """Nodes per head of a level."""
        return int(self._rows // FANOUT**level)

    def lowest_level(self, most: int) -> int:
        """Lowest level of at most `most` nodes per head; 0 if there is no node yet."""
        level = 1
        while self.count(level) > most:
            level += 1
        return level if self.count(level) else 0

    def extend(self, keys: Tensor, start: int = 0) -> None:
        """Summarise the rows from position `rows` on; keys: the layer's from `start` on, `[n_kv_heads, n, d]`.

        start: a multiple of 8, at most `needed_from`. Raises RowRangeError when there are fewer keys than
        rows, keys are missing before them, or there is another number of heads.
        """
        heads, n = keys.shape[0], start + keys.shape[1]
        if n < self._rows or start > self.needed_from or self._heads not in (0, heads):
            raise RowRangeError(
                f"keys of {heads} heads and {n} rows, from {start} on, were given to summaries of "
                f"{self._heads} heads and {self._rows} rows; give all keys of the layer from "
                f"{self.needed_from} on"
            )
        before, self._heads, self._rows = self._rows, heads, n
        level = 1
        while (count := self.count(level)) > 0:
            for first in range(before // FANOUT**level, count, _AT_ONCE):
                last = min(count, first + _AT_ONCE)
                members = (
                    keys[:, first * FANOUT - start : last * FANOUT - start]
                    if level == 1
                    else self._levels[level - 2][:, first * FANOUT : last * FANOUT]
                )
                self._append(level, first, _summarise(members, is_row=level == 1))
            level += 1

    def extend_by(self, fill: Fill, layout: PageLayout, rows: int) -> None:
        """Summarise the rows up to position `rows` by code that has the keys itself."""
        before, self._heads, self._rows = self._rows, layout.n_kv_heads, rows
        level = 1
        while (count := self.count(level)) > 0:
            if level > len(self._levels):
                self._levels.append(torch.empty(layout.n_kv_heads, 0, 2 * layout.head_dim))
            end, part = before // FANOUT**level, self._levels[level - 1]
            self._levels[level - 1] = reserve_behind(part, end, count, FANOUT)
            level += 1
        fill(self.describe(), before, rows)

    def truncate(self, rows: int) -> None:
        """Forget the rows from position `rows` on."""
        self._rows = min(self._rows, max(0, rows))

    def nodes(self, level: int, runs: Tensor | None = None) -> Tensor:
        """Means and variances of a level's nodes, `[n_kv_heads, m, 2 d]`, float32.

        runs: int64 `[n_kv_heads, r]`, the nodes of the next level whose 8 members are gathered; the
        last run may be one that is not full yet, and has any numbers where there is no node. None:
        all nodes, a view.
        """
        rows = self._levels[level - 1]
        return rows[:, : self.count(level)] if runs is None else gather_runs(rows, runs, FANOUT)

    def describe(self) -> Tensor:
        """Say where each level's nodes are, from 1 on, until they are extended.

        Returns their addresses, and how many numbers a head has there, int64 `[levels, 2]`.
        """
        places = [(each.data_ptr(), each.stride(0)) for each in self._levels]
        return torch.tensor(places, dtype=torch.int64).view(-1, 2)

    def _append(self, level: int, end: int, added: Tensor) -> None:
        part = self._levels[level - 1] if level <= len(self._levels) else None
        # A whole number of runs, so that each can be gathered in one piece.
        self._levels[level - 1 : level] = [append_behind(part, end, added, FANOUT)]


def _summarise(members: Tensor, *, is_row: bool) -> Tensor:
    """Summaries of each 8 rows, `[n_kv_heads, 8 * m, d]`, or of each 8 nodes, `[n_kv_heads, 8 * m, 2 d]`."""
    heads, n, _ = members.shape
    runs = members.float().reshape(heads, n // FANOUT, FANOUT, -1)
    means = runs if is_row else runs[..., : runs.shape[-1] // 2]
    mean = means.mean(2)
    # `Tensor.var` takes ten times as long over so few.
    variance = (means - mean[:, :, None]).square_().mean(2)
    if not is_row:
        variance += runs[..., runs.shape[-1] // 2 :].mean(2)
    return torch.cat([mean, variance], -1)
