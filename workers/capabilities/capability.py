"""Base of capabilities: every hook, which does nothing."""

from kvrecall.metrics.page import Metrics
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.forward_step import ForwardStep
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.steps import Steps
from workers.repair.reselection import StoredRows
from workers.retrieval.retriever import Retriever


class StepCapability:
    """A `workers.engine.capability.Capability` that does nothing; a real one overrides some hooks."""

    @property
    def retriever(self) -> Retriever | None:
        """Finder of rows for the next pass: none."""
        return None

    def before_step(
        self,
        engine: Engine,
        resident: ResidentSession,
        output_tokens: int,
        source: StoredRows | None = None,
    ) -> Steps[None]:
        """Prepare a step of decoding, of an answer or of recorded text.

        output_tokens: of the answer that have rows already. source: of the stored rows, the
        engine's store unless given, as in a replay. Raises the errors of the store.
        """
        yield from ()

    def clear_turn(self) -> None:
        """Clear what belongs to a turn."""

    def drop_host_copy(self) -> None:
        """Let go of the session's copy in host memory."""

    def end_pass(self, step: ForwardStep, metrics: Metrics) -> None:
        """Take what a pass of this session found."""

    def report(self, done: pb.TurnDone) -> None:
        """Report the turn."""
