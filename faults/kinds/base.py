"""The form of a fault."""

from collections.abc import Callable
from random import Random

from faults.rig.setups import Setup

Undo = Callable[[], None]
Inject = Callable[[Setup, Random], Undo | None]


class NothingToHitError(Exception):
    """There is no target for this fault, now or in this set-up."""
