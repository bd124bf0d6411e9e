"""A rank whose others are made up: what they say is given."""

from collections.abc import Sequence
from typing import Any

from workers.parallel.alone import Alone


class StubGroup(Alone):
    """Rank `index` of `count`; `said`: what the ranks say whenever they are asked."""

    def __init__(self, index: int, count: int, said: Sequence[Any] = ()) -> None:
        self.index = index
        self.count = count
        self._said = list(said)

    def gather(self, _value: Any) -> list[Any]:
        """Return what the ranks say."""
        return self._said
