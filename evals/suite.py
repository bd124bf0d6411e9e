"""What a suite is: units of work that know nothing of each other, a function that runs one, and what they come to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvrecall.reporting.results import Row

Record = Mapping[str, Any]
"""What a unit found: plain JSON values. Seconds stand apart from what must come out the same again."""


class Unit(Protocol):
    """A frozen dataclass of plain values: everything that its records depend on."""

    @property
    def label(self) -> str:
        """A few words for the progress bar."""
        ...


U = TypeVar("U", bound=Unit)


@dataclass(frozen=True)
class Suite(Generic[U]):
    """A suite that is ready to run.

    `run` is a function of a module, so that another process can import it. `rows` makes the result file's rows from
    the records of all units, in the units' order.
    """

    name: str
    seed: int
    model: str
    units: tuple[U, ...]
    run: Callable[[U], Sequence[Record]]
    rows: Callable[[Sequence[Record]], list[Row]]
