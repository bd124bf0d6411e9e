"""Greedy choice of lines by weight per cell, in rounds, with exact overlaps."""

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.prefill.block_rows import BlockRows

# Weights are summed as multiples of 2**-40: integers have one sum in whatever order a device adds
# them, so a block that is computed again takes the same lines. 512 rows fit into 64 bits.
_SCALE = 2.0**40
# A round takes at most this share of the lines, or as many lines; and at least this share of those
# taken before: the last per mille of the weight would otherwise take a round for each line.
_ROUND = 0.05
_ROUND_LINES = 32
_LEAST = 1 / 64
# Density of the lines that a round takes, to that of the best line of the other kind.
_SLACK = 0.8
# Weights that are summed at a time.
_RUN = 1 << 19


class LineSearch:
    """The lines that cover sampled attention weights, for all query heads of some KV heads.

    A slash line is a diagonal band of `width` distances. A cell lies on one column and on one slash
    line. So a column's uncovered weight is its sum
    without the cells of the slash lines taken, a slash line's that without the cells of the columns
    taken, and no cell is subtracted twice: overlaps are exact at the cost of the new lines' cells.

    Attributes:
        columns: Columns taken, bool `[h, n]`.
        slashes: Slash lines taken, bool `[h, b]`: line i has the distances from i * width on.
        exact: Heads that were given up, since their lines have too many cells, bool `[h]`.
    """

    def __init__(
        self,
        weights: Tensor,
        rows: BlockRows,
        drawn: Tensor,
        *,
        always: Tensor,
        band: int,
        width: int,
        tile: int,
        fitted: int,
    ) -> None:
        """Sum the weights by line, but for the cells that are always computed.

        Args:
            weights: Of the drawn queries, float32 `[h, s, n]`.
            rows: The block, of which h query heads are searched.
            drawn: Which of its queries the weights are of, int64 `[s]`.
            always: Rows that are computed in any case, bool `[kv, n]`, the block's own included.
            band: Distances under this one are computed in any case.
            width: Distances of a slash line.
            tile: Consecutive queries for which a row is computed if one of them wants it: a slash
                line costs (width + tile - 1) / width times its cells.
            fitted: The first so many drawn queries choose the lines, the others check them; with
                none left they check themselves.
        """
        heads, sampled, n = weights.shape
        self._group = rows.group
        self._drawn = rows.first + drawn
        self._positions = rows.positions.long()
        self._tokens = rows.tokens
        self._width = width
        self._slashes = -(-rows.end // width)
        open_rows = (rows.positions != EMPTY) & ~always
        self._weights = weights
        # Sets of rows: the first choose, the second check.
        self._sets = (slice(0, fitted), slice(fitted if fitted < sampled else 0, sampled))
        self._column_sums = torch.zeros(heads, 2, n, dtype=torch.int64, device=weights.device)
        self._left_slashes = self._column_sums.new_zeros(heads, 2, self._slashes)
        self._sum_weights(open_rows, band)
        self._left_columns = self._column_sums[:, 0].clone()
        counts = [rows.stop - rows.start for rows in self._sets]
        self._total = torch.tensor(counts, device=weights.device) * int(_SCALE)
        self._base = self._total - self._column_sums.sum(-1)
        self._column_cells = torch.where(open_rows, self._tokens, 0)
        self._slash_cells = self._count_cells(open_rows, rows, band) * (width + tile - 1) / width
        self._lookup = self._invert(open_rows, rows.first)
        self.columns = torch.zeros(heads, n, dtype=torch.bool, device=weights.device)
        self.slashes = torch.zeros(heads, self._slashes, dtype=torch.bool, device=weights.device)
        self.exact = torch.zeros(heads, dtype=torch.bool, device=weights.device)

    def run(self, alpha: float, max_density: float) -> None:
        """Take lines until both sets are covered by `alpha`, or a head is given up."""
        cells = torch.cat([self._column_cells, self._slash_cells], 1)
        cells = cells.repeat_interleave(self._group, 0)
        size = max(_ROUND_LINES, int(_ROUND * int((cells > 0).sum(1).max())))
        size = min(size, cells.shape[1])
        limit = max_density * self._column_cells.sum(1).repeat_interleave(self._group)
        while True:
            taken = torch.cat([self.columns, self.slashes], 1)
            left = cells.masked_fill(taken, 0)
            wanted = self._wanted(alpha)
            too_many = (cells * taken).sum(1) > limit if max_density < 1 else self.exact
            self.exact |= (wanted > 0) & (too_many | ~(left > 0).any(1))
            wanted = wanted.masked_fill(self.exact, 0.0)
            if not bool((wanted > 0).any()):
                return
            self._take(self._best(left, wanted, size))

    def checked_cover(self) -> Tensor:
        """Mean share of the checking rows' weight that is covered, float32 `[h]`."""
        return (self._covered()[:, 1].double() / self._total[1]).float()

    def _sum_weights(self, open_rows: Tensor, band: int) -> None:
        """Sum each set's weights by column and by slash line, and zero what is always computed.

        In runs of rows, whose temporaries stay in a cache.
        """
        heads, _, n = self._weights.shape
        size = max(1, _RUN // (heads * n))
        positions = self._positions.masked_fill(~open_rows, self._tokens + self._drawn.amax())
        for number, rows in enumerate(self._sets):
            for start in range(rows.start, rows.stop, size):
                run = slice(start, min(start + size, rows.stop))
                distance = self._drawn[run, None] - positions[:, None]
                closed = (distance < band).repeat_interleave(self._group, 0)
                fixed = _to_fixed(self._weights[:, run].masked_fill_(closed, 0.0))
                self._column_sums[:, number] += fixed.sum(1)
                at = (distance.clamp_(min=0) // self._width).repeat_interleave(self._group, 0)
                sums = self._left_slashes[:, number]
                sums.scatter_add_(1, at.flatten(1), fixed.flatten(1))

    def _count_cells(self, open_rows: Tensor, rows: BlockRows, band: int) -> Tensor:
        """Cells of the block by slash line, int64 `[kv, b]`: open rows that queries see on it.

        The rows at distance o are those at the positions first - o to first - o + t - 1.
        """
        at = self._positions.masked_fill(~open_rows, rows.end)
        known = at.new_zeros(len(at), rows.end + 1).scatter_add_(1, at, open_rows.long())
        before = torch.nn.functional.pad(known[:, : rows.end].cumsum(1), (1, 0))
        start = rows.first - torch.arange(self._slashes * self._width, device=at.device)
        stop = (start + rows.tokens).clamp(0, rows.end)
        counts = before[:, stop] - before[:, start.clamp(min=0)]
        counts[:, :band] = 0
        return counts.view(len(at), self._slashes, self._width).sum(-1)

    def _invert(self, open_rows: Tensor, first: int) -> Tensor:
        """Index of the open row at each position before the block, int64 `[kv, first]`, or -1."""
        kv, n = open_rows.shape
        index = torch.full((kv, first + 1), -1, dtype=torch.int64, device=open_rows.device)
        at = self._positions.masked_fill(~open_rows, first)
        index.scatter_(1, at, torch.arange(n, device=at.device).expand(kv, n))
        return index[:, :first]

    def _covered(self) -> Tensor:
        """Weight of each set on the lines taken and on what is always computed, int64 `[h, 2]`."""
        columns = (self._column_sums * self.columns[:, None]).sum(-1)
        slashes = (self._left_slashes * self.slashes[:, None]).sum(-1)
        return self._base + columns + slashes

    def _wanted(self, alpha: float) -> Tensor:
        """Weight in the first set to take next, float64 `[h]`: what the worse set lacks.

        Not over 0 where both are covered; exact at alpha = 1, where nothing may be missing.
        """
        missing = (self._total - self._covered()).double() / self._total
        return (missing - (1 - alpha)).amax(1) * self._total[0]

    def _best(self, left: Tensor, wanted: Tensor, size: int) -> Tensor:
        """Choose the densest lines up to the wanted weight: bool `[h, n + b]`, at most `size`.

        Columns or slash lines: those of one kind do not overlap, so their weights stay as they are
        while they are taken. Not much sparser ones than the best of the other kind.
        """
        n = self.columns.shape[1]
        gains = torch.cat([self._left_columns, self._left_slashes[:, 0]], 1)
        density = torch.where(left > 0, gains / left.clamp(min=1), -1.0)
        column, slash = density[:, :n].amax(1, True), density[:, n:].amax(1, True)
        is_slash = torch.arange(density.shape[1], device=density.device) >= n
        best = density.masked_fill(is_slash != (slash > column), -1.0).topk(size, 1)
        gained = gains.gather(1, best.indices)
        before = gained.cumsum(1) - gained
        least = (_LEAST * (self.columns.sum(1) + self.slashes.sum(1)))[:, None]
        more = torch.arange(size, device=least.device) < least
        chosen = (before < wanted[:, None]) | more
        chosen &= (best.values >= 0) & (best.values >= _SLACK * torch.minimum(column, slash))
        chosen &= (wanted > 0)[:, None]
        return torch.zeros_like(left, dtype=torch.bool).scatter_(1, best.indices, chosen)

    def _take(self, chosen: Tensor) -> None:
        """Take lines, bool `[h, n + b]`, and subtract their cells from the lines that cross them."""
        n = self.columns.shape[1]
        columns, slashes = chosen[:, :n], chosen[:, n:]
        self._take_columns(*columns.nonzero(as_tuple=True))
        self._take_slashes(*slashes.nonzero(as_tuple=True))
        self.columns |= columns
        self.slashes |= slashes

    def _take_columns(self, head: Tensor, column: Tensor) -> None:
        """Subtract the cells of columns, int64 `[k]` each, from the slash lines."""
        distance = self._drawn - self._positions[head // self._group, column][:, None]
        at = (head[:, None] * 2) * self._slashes + distance // self._width
        cells = _to_fixed(self._weights[head, :, column])
        for number, rows in enumerate(self._sets):
            flat = (at[:, rows] + number * self._slashes).flatten()
            self._left_slashes.view(-1).index_add_(0, flat, cells[:, rows].flatten(), alpha=-1)

    def _take_slashes(self, head: Tensor, slash: Tensor) -> None:
        """Subtract the cells of slash lines, int64 `[k]` each, from the first set's columns."""
        rows = torch.arange(self._weights.shape[1], device=head.device)[self._sets[0]]
        distance = slash[:, None] * self._width + torch.arange(self._width, device=head.device)
        position = self._drawn[rows] - distance[..., None]
        known = (position >= 0) & (position < self._lookup.shape[1])
        column = self._lookup[(head // self._group)[:, None, None], position.where(known, 0)]
        known &= column >= 0
        column = column.where(known, 0)
        head = head[:, None, None]
        cells = _to_fixed(self._weights[head, rows, column]) * known
        flat = (head * self.columns.shape[1] + column).flatten()
        self._left_columns.view(-1).index_add_(0, flat, cells.flatten(), alpha=-1)


def _to_fixed(weights: Tensor) -> Tensor:
    """Weights of 0 to 1 as multiples of 1 / _SCALE, int64."""
    return (weights * _SCALE).round_().long()
