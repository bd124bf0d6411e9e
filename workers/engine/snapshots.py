"""Stored recurrent states of a session: which there are, and which of them stay.

A session has a list of positions, ascending: the number of rows before each state. All are whole pages.
The last one is where the next turn begins.
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


def find_last(positions: Sequence[int], tokens: int) -> int:
    """Find the last state within the first `tokens` tokens; returns its position, 0 for none."""
    return max((at for at in positions if at <= tokens), default=0)


def choose_dropped(positions: Sequence[int], interval: int, anchor: int = 0) -> list[int]:
    """Choose the states that are no longer needed; returns their indices, descending.

    The last two stay, since the last may not be committed yet; so does the first, where other
    sessions that begin alike may begin, and the one at `anchor`; and of the others as many as rows
    outweigh: one for each `interval` tokens.
    """
    dropped = []
    last = 0
    for i, at in enumerate(positions[:-2]):
        if i == 0 or at == anchor or at - last >= interval:
            last = at
        else:
            dropped.append(i)
    return dropped[::-1]
