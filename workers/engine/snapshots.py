"""Stored recurrent states of a session: which there are, and which of them stay.

A session has a list of positions, one for each state in the order of writing: the number of rows written
before it (`workers.engine.stored.written`), or 0 for one that was dropped. All are whole pages. The last one is
where the next turn begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # checks of a stopped service's files need the numbers alone
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of a session's recurrent states after its first `position` tokens.

    Attributes:
        position: Tokens that the states have seen.
        state: The tensors, see `StatePool.copy`; none before the first token.
    """

    position: int = 0
    state: "tuple[Tensor, ...]" = ()

    def to_host(self) -> "Snapshot":
        """Move the tensors to host memory."""
        return Snapshot(self.position, tuple(part.cpu() for part in self.state))


def count_stored(positions: Sequence[int], tokens: int) -> int:
    """Count the states up to the last one within the first `tokens` tokens, dropped ones included."""
    found = (i + 1 for i, at in enumerate(positions) if 0 < at <= tokens)
    return max(found, default=0)


def find_last(positions: Sequence[int], tokens: int) -> int:
    """Find the last state within the first `tokens` tokens; returns its position, 0 for none."""
    return max((at for at in positions if at <= tokens), default=0)


def choose_dropped(
    positions: Sequence[int], shared: int, interval: int, anchor: int = 0
) -> list[int]:
    """Choose the states that are no longer needed; returns their indices.

    The last two stay, since the last may not be committed yet; so does the first, where other
    sessions that begin alike may begin, and the one at `anchor`; and of the others as many as rows
    outweigh: one for each `interval` tokens. The first `shared` are other sessions'.
    """
    dropped = []
    last = max(positions[:shared], default=0)
    own = [i for i in range(shared, len(positions)) if positions[i]]
    for i in own[:-2]:
        if i == own[0] or positions[i] == anchor or positions[i] - last >= interval:
            last = positions[i]
        else:
            dropped.append(i)
    return dropped
