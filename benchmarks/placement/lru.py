"""Blocks of a tier, least recently used first."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Blocks:
    """Blocks of a tier that holds up to `limit`; the one that is used least recently makes room."""

    limit: int
    _ids: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __contains__(self, block: int) -> bool:
        return block in self._ids

    def use(self, blocks: Sequence[int]) -> None:
        """Add a prompt's blocks, or note that they are used now: the last one makes room first."""
        ids = self._ids
        for block in reversed(blocks):
            ids[block] = None
            ids.move_to_end(block)
        while len(ids) > self.limit:
            ids.popitem(last=False)
