"""How one pass of a session behind the model's window sees the rows that were computed before it."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from workers.positions.chunks import Segment
from workers.positions.tables import RotationTables

# Keys that are turned at once: what they are computed in stays in a processor's cache.
_TILE_ROWS = 1024


class SeenRows:
    """The rows of a session's layers of one kind, by the segments of a pass (`Chunks.find_segments`).

    Stored keys stay as they were computed. What is compared with few queries is not turned either: the
    queries are, against the shift, once for each segment.

    Attributes:
        starts: First row of each segment, int64 `[segments]`, on the host.
        shifts: What is added to the positions at which each one's rows were computed, as `starts`.
    """

    def __init__(self, tables: RotationTables, segments: Sequence[Segment]) -> None:
        """Begin a pass; tables: of the layers whose rows are seen."""
        self._tables = tables
        self._starts = tuple(segment.start for segment in segments)
        self._shifts = tuple(segment.shift for segment in segments)
        self.starts, self.shifts = torch.tensor(self._starts), torch.tensor(self._shifts)
        self._against = tuple(-shift for shift in self._shifts)
        self._later: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self._starts)

    def split(self, first: int, length: int) -> list[int]:
        """Split rows from position `first` on into segments; returns how many rows each one has."""
        bounds = [min(max(start - first, 0), length) for start in self._starts[1:]]
        return [stop - start for start, stop in pairwise([0, *bounds, length])]

    def find_segments(self, positions: Tensor) -> Tensor:
        """Find the segment of each position, int64 of the same shape."""
        kind = (positions.dtype, positions.device)
        if kind not in self._later:
            self._later[kind] = torch.tensor(self._starts[1:], dtype=kind[0], device=kind[1])
        return torch.searchsorted(self._later[kind], positions.contiguous(), right=True)

    def turn(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Turn keys `[..., m, head_dim]` of positions, int `[..., m]`, to where the pass sees them.

        A position behind all rows, or of none, counts to the pass's own chunk.
        """
        found = self.find_segments(positions)
        rotation, cosines, sines = self._tables.get(layer, self._shifts, keys.device)
        return rotation.turn(keys, cosines[found], sines[found])

    def turn_run(self, layer: int, keys: Tensor, first: int = 0) -> Tensor:
        """Turn keys `[..., n, head_dim]` of consecutive positions from `first` on, as `turn`."""
        return self.turn_run_in_place(layer, keys.clone(), first)

    def turn_run_in_place(self, layer: int, keys: Tensor, first: int = 0) -> Tensor:
        """Turn keys as `turn_run`, where they are; returns them."""
        rotation, cosines, sines = self._tables.get(layer, self._shifts, keys.device)
        parts = torch.split(keys, self.split(first, keys.shape[-2]), -2)
        for index, (part, shift) in enumerate(zip(parts, self._shifts, strict=True)):
            for tile in torch.split(part, _TILE_ROWS, -2) if shift else ():
                rotation.turn_in_place(tile, cosines[index], sines[index])
        return keys

    def turn_queries(self, layer: int, queries: Tensor) -> Tensor:
        """Turn queries `[n_kv_heads, group, head_dim]` to ask each segment's keys as they were computed.

        Returns `[segments, n_kv_heads, group, head_dim]`.
        """
        rotation, cosines, sines = self._tables.get(layer, self._against, queries.device)
        asked = queries.expand(self.count, *queries.shape)
        return rotation.turn(asked, cosines[:, None, None], sines[:, None, None])
