"""Places of a session's tokens behind some pages of other sessions."""

from dataclasses import dataclass

from workers.positions.chunks import Chunks, Segment, merge_segments


@dataclass(frozen=True)
class PlacedPages(Chunks):
    """A session whose first rows, up to `window`, are pages of `size` rows of other sessions, one after the other.

    Each was computed at its position in its own session, and is seen where it lies here: the session's own
    tokens, which are fewer than the model's window holds beside the pages, are at true distances to all.

    Attributes:
        first: Position of each page's first row in its own session.
    """

    first: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless the pages end at `window`."""
        if len(self.first) * self.size != self.window:
            raise ValueError(
                f"{len(self.first)} pages of {self.size} rows do not end at {self.window}"
            )

    def place(self, position: int) -> int:
        """As of `Chunks`: where it is."""
        return position

    def find_start(self, position: int) -> int:
        """As of `Chunks`: the session's own tokens are one chunk."""
        return self.window

    def find_cuts(self, first: int, tokens: int) -> list[int]:
        """As of `Chunks`: none."""
        return []

    def find_segments(self, first: int) -> tuple[Segment, ...]:
        """As of `Chunks`: a segment for each page that does not follow the one before it."""
        starts = range(0, self.window, self.size)
        pages = [Segment(at, at - own) for at, own in zip(starts, self.first, strict=True)]
        return merge_segments([*pages, Segment(self.window, 0)])
