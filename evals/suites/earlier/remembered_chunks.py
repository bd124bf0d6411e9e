"""Places of a session's tokens behind the rows of other sessions."""

from dataclasses import dataclass

from workers.positions.chunks import Chunks, Segment, merge_segments


@dataclass(frozen=True)
class RememberedChunks(Chunks):
    """Chunks of a session whose first rows, up to `window`, are those of other sessions, one after the other.

    Each of these was computed at its true position in its own session, and is seen as the oldest rows of a
    long session are: as if all were in one chunk, in the order of their places there.

    Attributes:
        lengths: Rows of each of the other sessions, which are shorter than the model's window.
    """

    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless the other sessions' rows come before the window's end."""
        if sum(self.lengths) != self.window:
            raise ValueError(f"rows of {self.lengths} tokens do not end at {self.window}")

    def find_segments(self, first: int) -> tuple[Segment, ...]:
        """As of `Chunks`; the session's own tokens begin at `window`."""
        own = self.find_start(first)
        before = own - self.size
        begin, segments = 0, list[Segment]()
        for length in self.lengths:
            segments += [Segment(begin + at, -at) for at in range(0, length, self.size)]
            begin += length
        if before > self.window:
            segments.append(Segment(self.window, -2 * self.size))
        if before >= self.window:
            segments.append(Segment(before, -self.size))
        return merge_segments([*segments, Segment(own, 0)])
