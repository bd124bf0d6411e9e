"""Settings of a DCI-tree, and the segments that a number of rows is divided into."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvstore.errors import IndexSettingsError

Rank = Literal["centroid_sd", "parent"]
"""How nodes are ranked for a query.

`parent`: by the key of the row that was promoted, as in the paper. `centroid_sd`: by the mean of the
node's keys and their standard deviation along the query.
"""

# Rows of the smallest segment; as many rows at the end, less one, are in none and always candidates.
SMALLEST_SEGMENT = 256


@dataclass(frozen=True)
class DciSettings:
    """Settings of a DCI-tree; the tree is a function of keys and settings.

    Attributes:
        scan: Share of the rows that a search returns, shared by the queries of a group.
        scan_floor: Rows that a search returns at least, as far as there are as many.
        refine: Lloyd rounds after the assignment to the nearest promoted row; 0 in the paper.
        rank: See `Rank`; `parent` in the paper.
        promotion: Share of the rows that are promoted to nodes, then that of the nodes which are
            promoted to the nodes of the level above, and so on. (0.01, 0.2, 0.2, 0.2) in the
            authors' code. One level by default: up to 262,144 rows it is faster to compare all
            nodes than to gather those under the best of a level above.
        segment: Rows of the largest segment; 256 times a power of 2. The paper's single tree is a
            segment as long as the session.

    Raises IndexSettingsError when a value is out of range.
    """

    scan: float = 0.2
    scan_floor: int = 2048
    refine: int = 2
    rank: Rank = "centroid_sd"
    promotion: tuple[float, ...] = (1 / 16,)
    segment: int = 4096

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 < self.scan <= 1:
            raise IndexSettingsError(f"scan is {self.scan}; take a share of rows, over 0, up to 1")
        if self.scan_floor < 0 or self.refine < 0:
            raise IndexSettingsError(
                f"scan_floor is {self.scan_floor} and refine {self.refine}; neither may be negative"
            )
        if not self.promotion or not all(0 < share < 1 for share in self.promotion):
            raise IndexSettingsError(
                f"promotion is {self.promotion}; take a share between 0 and 1 for each level"
            )
        size = SMALLEST_SEGMENT
        while size < self.segment:
            size *= 2
        if size != self.segment:
            raise IndexSettingsError(
                f"segment is {self.segment}; take {SMALLEST_SEGMENT} rows times a power of 2"
            )

    def budget(self, rows: int) -> int:
        """Rows that a search among `rows` rows returns."""
        return min(rows, max(self.scan_floor, -int(-self.scan * rows // 1)))

    def nodes(self, rows: int) -> tuple[int, ...]:
        """Nodes of a segment of `rows` rows, per level from the bottom."""
        counts = []
        for share in self.promotion:
            rows = max(1, round(share * rows))
            counts.append(rows)
        return tuple(counts)

    def most_nodes(self, rows: int) -> tuple[int, ...]:
        """Nodes of all segments of `rows` rows or fewer, per level from the bottom, at most."""
        segments = rows // self.segment + (self.segment // SMALLEST_SEGMENT).bit_length()
        counts = []
        for share in self.promotion:
            rows = int(share * rows) + segments  # of each a number that is rounded, 1 at least
            counts.append(rows)
        return tuple(counts)

    def segments(self, rows: int) -> Iterator[int]:
        """Sizes of the segments of the first `rows` rows, in their order.

        Full segments first, then smaller ones, one of each size at most: with the 256 rows that
        complete it a segment takes the place of all smaller ones. So a row is built into a segment
        once per size, and which segments there are does not depend on how the rows arrived.
        """
        size = self.segment
        while size >= SMALLEST_SEGMENT:
            yield from [size] * (rows // size)
            rows %= size
            size //= 2


PAPER = DciSettings(
    scan_floor=0, refine=0, rank="parent", promotion=(0.01, 0.2, 0.2, 0.2), segment=4**16
)
"""The tree of IceCache (section 3.3), with the promotion of the authors' code."""
