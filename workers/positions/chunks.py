"""Positions by chunks: where the model computes a token, and where later tokens see it."""

from dataclasses import dataclass
from itertools import pairwise

# Tokens of a prompt's block, unless the operator says otherwise.
_BLOCK_TOKENS = 256


@dataclass(frozen=True)
class Segment:
    """Consecutive rows from position `start` on, all seen `shift` positions behind where they were computed."""

    start: int
    shift: int


@dataclass(frozen=True)
class Chunks:
    """Places of tokens in sessions of any length, in a model that knows `window` positions.

    Up to the window every token is computed and seen at its true position. Behind it the positions are cut
    into chunks of `size` tokens, the first of which begins where the window ends; the window itself counts as
    the chunks before. A token behind the window is computed at `2 * size` and its offset in its chunk. A query
    sees the rows of its own chunk and of the one before at their true distances, and all older ones at the
    places of one chunk, from 0 on: at distances between `size` and `3 * size`, in the order of their offsets.

    All of it follows from positions alone, so nothing is stored, and every worker with this window and this
    size sees the same.

    Source: "Training-Free Long-Context Scaling of Large Language Models" (An et al. 2024), dual chunk
    attention. Deviations: positions within the window are true ones; a row is computed once, in its
    own chunk, and turned by a constant for each later class.
    """

    window: int
    size: int

    def __post_init__(self) -> None:
        """Raise ValueError for chunks of which three do not fit the window."""
        if self.size < 1 or 3 * self.size > self.window:
            raise ValueError(
                f"chunks of {self.size} tokens do not fit three times into a window of {self.window}"
            )

    def place(self, position: int) -> int:
        """Return the position at which the model computes a token."""
        if position < self.window:
            return position
        return 2 * self.size + (position - self.window) % self.size

    def find_start(self, position: int) -> int:
        """Return the first position of a token's chunk; negative in the first one of most windows."""
        return position - (position - self.window) % self.size

    def find_cuts(self, first: int, tokens: int) -> list[int]:
        """Find where chunks begin among tokens from position `first` on, as their numbers there.

        A pass over tokens of two chunks would see the rows before it at two distances.
        """
        begin = max(self.window, self.find_start(first))
        return [at - first for at in range(begin, first + tokens, self.size) if at > first]

    def find_segments(self, first: int) -> tuple[Segment, ...]:
        """Find how a pass whose first token is at `first`, behind the window, sees all rows.

        Ascending, from position 0 on. The last segment is the pass's own chunk, which is seen where it was
        computed; what a pass adds behind its chunk's end counts to it.
        """
        own = self.find_start(first)
        before = own - self.size
        oldest = self.find_start(0)
        begins = range(oldest, min(before, self.window), self.size)
        older = [Segment(max(0, begin), -begin) for begin in begins]
        if before > self.window:
            older.append(Segment(self.window, -2 * self.size))
        computed = 2 * self.size if before >= self.window else before
        segments = [*older, Segment(max(0, before), self.size - computed), Segment(own, 0)]
        return merge_segments(segments)


def choose_size(window: int, page_tokens: int) -> int | None:
    """Choose the size of a window's chunks: about a sixth of it; None where a third is less than a page.

    So old rows are seen at most half a window away: models are weak near the end of their window. It follows
    from the window alone, whatever a worker's blocks are, and is a multiple of the usual ones, so that the
    blocks of sessions that share their beginning fall into the same places.
    """
    if window < 3 * page_tokens:
        return None
    unit = _BLOCK_TOKENS if window >= 6 * _BLOCK_TOKENS else page_tokens
    return max(page_tokens, window // 6 - window // 6 % unit)


def merge_segments(segments: list[Segment]) -> tuple[Segment, ...]:
    """Join adjacent segments of one shift."""
    changed = [after for before, after in pairwise(segments) if before.shift != after.shift]
    return (segments[0], *changed)
