"""A suite: independent units of work, a function that runs one, and one that builds rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvrecall_server.reporting.results import Row

# A unit's result: plain JSON values. Seconds have keys of their own: all else is reproducible.
Record = Mapping[str, Any]


class Unit(Protocol):
    """A frozen dataclass of plain values: everything that its records depend on."""

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        ...


U = TypeVar("U", bound=Unit)


@dataclass(frozen=True)
class Suite(Generic[U]):
    """A suite that is ready to run.

    `run` is a module-level function, so that another process can import it. `rows` builds the
    result file's rows from the records of all units, in the units' order.
    """

    name: str
    seed: int
    model: str
    units: tuple[U, ...]
    run: Callable[[U], Sequence[Record]]
    rows: Callable[[Sequence[Record]], list[Row]]
