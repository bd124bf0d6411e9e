"""Nodes of a DCI-tree: building one segment's levels, and the arrays that hold all segments'."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvstore.index.arrays import append_behind, grown_bytes
from kvstore.index.dci.settings import DciSettings

# Numbers of a matrix of distances that is computed at once.
_CHUNK = 1 << 22
# Largest norm that the lifted space has room for, in units of the largest norm there is.
_HEADROOM = 1.25
# Multiples of it are spread evenly over the fractions.
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class Nodes:
    """Nodes of one level; their members are nodes of the level below, or rows.

    Attributes:
        centre: What a query is compared to, `[n_kv_heads, m, d]`: the mean of the node's keys or the
            key of the promoted row.
        variance: Variance of the node's keys in each channel, `[n_kv_heads, m, d]`; d is 0 where
            nodes are ranked by the promoted row.
        rows: Rows below each node, int32 `[n_kv_heads, m]`; 0 for an empty node.
        starts: Index of each node's first member in `members`, int32 `[n_kv_heads, m]`.
        sizes: Number of its members, int32 `[n_kv_heads, m]`.
        members: Members, node by node, int32 `[n_kv_heads, n]`: indices of the level below.
    """

    centre: Tensor
    variance: Tensor
    rows: Tensor
    starts: Tensor
    sizes: Tensor
    members: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All arrays, in the order of the attributes."""
        return self.centre, self.variance, self.rows, self.starts, self.sizes, self.members

    def shifted(self, below: int) -> "Nodes":
        """The same nodes behind `below` members of other segments."""
        return replace(self, starts=self.starts + below, members=self.members + below)


def build_levels(keys: Tensor, settings: DciSettings) -> list[Nodes]:
    """Build the levels of one segment, from the bottom; keys: `[n_kv_heads, n, d]`.

    A node's members are those whose nearest promoted row it has (IceCache, Algorithm 2), then, for
    each Lloyd round, those that are nearest to its mean.
    """
    dtype = keys.dtype
    centre = mean = keys.float()
    second = mean.square()
    rows = torch.ones(keys.shape[:2], dtype=torch.int32, device=keys.device)
    levels = []
    for count in settings.nodes(keys.shape[1]):
        promoted = promote(centre.shape[1], count, keys.device)
        labels = assign(lift(centre), promoted, settings.refine)
        weight = rows[..., None].float()
        total = add_up(rows, labels, count)
        divisor = total.clamp_min(1)[..., None]
        mean = add_up(mean * weight, labels, count) / divisor
        second = add_up(second * weight, labels, count) / divisor
        if settings.rank == "parent":
            centre, variance = centre[:, promoted], mean[..., :0]
        else:
            centre = mean
            variance = (second - mean.square()).clamp(0, torch.finfo(dtype).max)
        sizes = add_up(torch.ones_like(rows), labels, count)
        members = labels.argsort(dim=-1, stable=True).int()
        starts = sizes.cumsum(1, dtype=torch.int32) - sizes
        rows = total
        levels.append(Nodes(centre.to(dtype), variance.to(dtype), rows, starts, sizes, members))
    return levels


def promote(n: int, count: int, device: torch.device) -> Tensor:
    """Promote one of each `count` equal stretches of `n`, by counting; int64 `[count]`.

    Every 1/r-th, as in the authors' code, would be the same line of each record where the text
    repeats a form of that length. So the place within a stretch varies, by the golden ratio.
    """
    stretch = torch.arange(count, device=device, dtype=torch.float64)
    return ((stretch + (stretch * _GOLDEN).frac()) * n / count).long()


def lift(points: Tensor) -> Tensor:
    """Lift float32 points `[n_kv_heads, n, d]` onto the unit sphere in d + 1 dimensions.

    T_K of the paper (appendix B.1). The largest norm is of these points alone: each segment is
    clustered in a space of its own, so that no later key can lie outside of it.
    """
    largest = points.norm(dim=-1).amax(-1)[:, None, None].clamp_min(torch.finfo().tiny)
    points = points / (_HEADROOM * largest)
    height = (1 - points.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
    return torch.cat([points, height], dim=-1)


def assign(points: Tensor, promoted: Tensor, rounds: int) -> Tensor:
    """Assign points `[n_kv_heads, n, d]` to the nearest promoted one, then `rounds` times to means.

    promoted: int64 `[m]`, indices of points. Returns indices of `promoted`, int64 `[n_kv_heads, n]`.
    """
    centres = points[:, promoted]
    labels = nearest(points, centres)
    ones = torch.ones(points.shape[:2], device=points.device)
    for _ in range(rounds):
        count = add_up(ones, labels, len(promoted))[..., None]
        mean = add_up(points, labels, len(promoted)) / count.clamp_min(1)
        centres = torch.where(count > 0, mean, centres)
        labels = nearest(points, centres)
    return labels


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Index of the nearest centre of each point, int64 `[n_kv_heads, n]`."""
    offset = centres.square().sum(-1)[:, None] / 2
    step = max(1, _CHUNK // centres.shape[1])
    found = [
        torch.baddbmm(offset, piece, centres.transpose(1, 2), beta=-1).argmax(-1)
        for piece in torch.split(points, step, dim=1)
    ]
    return torch.cat(found, dim=1)


def add_up(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Add up values `[n_kv_heads, n, ...]` by label, to `[n_kv_heads, count, ...]`.

    In the order of the values, so that on a CPU the sums are the same each time.
    """
    heads = len(values)
    index = labels + count * torch.arange(heads, device=labels.device)[:, None]
    total = values.new_zeros(heads * count, *values.shape[2:])
    total.index_add_(0, index.flatten(), values.flatten(0, 1))
    return total.view(heads, count, *values.shape[2:])


class Level:
    """One level of all segments, in the order of the segments; grows and is cut at its end."""

    def __init__(self) -> None:
        self._reserved: Nodes | None = None
        self._nodes = 0
        self._members = 0

    @property
    def count(self) -> int:
        """Nodes per head."""
        return self._nodes

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with what is reserved."""
        return sum(part.nbytes for part in self._reserved.tensors()) if self._reserved else 0

    @property
    def nodes(self) -> Nodes:
        """Views of the nodes."""
        assert self._reserved, "a level has nodes once a segment was appended"
        *parts, members = self._reserved.tensors()
        return _nodes([*(part[:, : self._nodes] for part in parts), members[:, : self._members]])

    def append(self, added: Nodes) -> None:
        """Append a segment's nodes, whose members are counted from the segment's first on."""
        added = added.shifted(self._members)
        ends = (*[self._nodes] * 5, self._members)
        parts = self._reserved.tensors() if self._reserved else [None] * 6
        grown = [
            append_behind(part, end, more)
            for part, end, more in zip(parts, ends, added.tensors(), strict=True)
        ]
        self._reserved = _nodes(grown)
        self._nodes += added.rows.shape[1]
        self._members += added.members.shape[1]

    def cut(self, nodes: int, members: int) -> None:
        """Keep the first nodes and members."""
        self._nodes, self._members = nodes, members


def _nodes(parts: Sequence[Tensor]) -> Nodes:
    """Nodes of arrays in the order of the attributes."""
    centre, variance, rows, starts, sizes, members = parts
    return Nodes(centre, variance, rows, starts, sizes, members)


def level_bytes(nodes: int, members: int, node_bytes: int) -> int:
    """Most bytes of one head in a level of so many nodes and members, with what is reserved.

    node_bytes: of a node's centre and variance.
    """
    numbers = 3 * nodes + members
    return grown_bytes(nodes * node_bytes + numbers * torch.int32.itemsize)


def node_ends(sizes: Sequence[int], settings: DciSettings) -> list[int]:
    """Rows of the segments of these sizes, then their nodes per level from the bottom."""
    totals = [sum(sizes)]
    counts = [settings.nodes(size) for size in sizes]
    for level in range(len(settings.promotion)):
        totals.append(sum(count[level] for count in counts))
    return totals
