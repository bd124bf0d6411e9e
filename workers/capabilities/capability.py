"""Base of capabilities: every hook, which does nothing."""

from dataclasses import dataclass

from kvrecall.metrics.page import Metrics
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.forward_step import ForwardStep
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.steps import Steps
from workers.repair.reselection import StoredRows
from workers.retrieval.retriever import Retriever


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


class StepCapability:
    """A `workers.engine.capability.Capability` that does nothing; a real one overrides some hooks."""

    @property
    def retriever(self) -> Retriever | None:
        """Finder of rows for the next pass: none."""
        return None

    def before_step(self, step: NextStep) -> Steps[None]:
        """Prepare a step of decoding. Raises the errors of the store."""
        yield from ()

    def clear_turn(self) -> None:
        """Clear what belongs to a turn."""

    def drop_host_copy(self) -> None:
        """Let go of the session's copy in host memory."""

    def end_pass(self, step: ForwardStep, metrics: Metrics) -> None:
        """Take what a pass of this session found."""

    def report(self, done: pb.TurnDone) -> None:
        """Report the turn."""
