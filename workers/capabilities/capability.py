"""Base of all capabilities, and the step that they prepare."""

from dataclasses import dataclass

from workers.engine.capability import Capability
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.steps import Steps
from workers.repair.reselection import StoredRows


@dataclass(frozen=True)
class NextStep:
    """A step of decoding that is to be prepared, of an answer or of recorded text.

    Attributes:
        engine: The engine that will run it.
        resident: The session, in its slot.
        output_tokens: Tokens of the answer that have rows already.
        source: Of the stored rows, in a replay that restores some of them; None: the engine's store.
    """

    engine: Engine
    resident: ResidentSession
    output_tokens: int
    source: StoredRows | None = None


class StepCapability(Capability):
    """A capability that may prepare the steps of decoding."""

    def before_step(self, step: NextStep) -> Steps[None]:
        """Prepare a step. Raises the errors of the store."""
        yield from ()
