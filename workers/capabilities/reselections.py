"""Re-selections of a session's answer."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.capabilities.capability import NextStep, StepCapability
from workers.generation.steps import Steps
from workers.parallel.group import Group
from workers.repair.reselection import TurnReselections, reselect


class Reselections(StepCapability):
    """Re-selections before the steps of an answer (LoopServe section 5.2)."""

    def __init__(self) -> None:
        self._turn = TurnReselections()

    def before_step(self, step: NextStep) -> Steps[None]:
        """Select the session's rows anew, if that is due."""
        yield from reselect(step.engine, step.resident, step.output_tokens, self._turn, step.source)

    def clear_turn(self) -> None:
        """Begin the turn's counts anew; its neutral signal is observed again."""
        self._turn = TurnReselections()

    def report(self, done: pb.TurnDone, group: Group) -> None:
        """Report the turn's re-selections, if there were any."""
        own = self._turn.report
        if own.count:
            done.reselections.CopyFrom(own)
            rows = group.gather((own.rows_in, own.rows_out))
            done.reselections.rows_in, done.reselections.rows_out = map(
                sum, zip(*rows, strict=True)
            )
