"""Capability of a session, as far as the engine calls it: every hook, which does nothing."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.forward_step import ForwardStep
from workers.parallel.group import Group
from workers.retrieval.retriever import Retriever


class Capability:
    """What one session does beyond attending to its active rows, and the state of it.

    A real one overrides some hooks. `workers/capabilities/` has the list of all, and the hook of a
    step, which needs the engine.
    """

    @property
    def retriever(self) -> Retriever | None:
        """Finder of rows that the session's next pass attends to as well; None for no rows."""
        return None

    def clear_turn(self) -> None:
        """Clear what belongs to a turn: a session resumed in between then computes the same."""

    def drop_host_copy(self) -> None:
        """Let go of the session's copy in host memory, which is freed."""

    def end_pass(self, step: ForwardStep) -> None:
        """Take what a pass of this session found."""

    def report(self, done: pb.TurnDone, group: Group) -> None:
        """Report the turn, if there is something to report: of the heads of all ranks of the group."""
