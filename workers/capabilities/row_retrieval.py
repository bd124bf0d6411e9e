"""Retrieval of a session's steps: room in the slot, rows in host memory, and the turn's report."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.capabilities.capability import NextStep, StepCapability
from workers.generation.host_copy import fill_host_copy
from workers.generation.steps import Steps
from workers.parallel.group import Group
from workers.retrieval.retriever import RetrievalCounts, Retriever


class RowRetrieval(StepCapability):
    """The session's retriever, once a step has needed one, and whether there was no memory for it.

    Without memory the turn goes on and attends to its active rows alone.
    """

    def __init__(self) -> None:
        self._retriever: Retriever | None = None
        self._refused = False

    @property
    def retriever(self) -> Retriever | None:
        """Finder of rows for the next pass; None until a step of the turn was prepared."""
        found = self._retriever
        return found if found is not None and found.ready else None

    def before_step(self, step: NextStep) -> Steps[None]:
        """Prepare a step, of one token, to retrieve.

        Afterwards every row of the session is active, or in its host copy. What is retrieved is
        therefore a function of the session's tokens alone, however far writes have come.

        Nothing happens for a session without retrieval, while all rows are active, and where there
        is no memory for the copy. Yields between copies. Raises the errors of the store.
        """
        engine, resident = step.engine, step.resident
        settings = resident.config.retrieval
        if settings is None or self._refused:
            return
        # An automatic budget begins to retrieve with its first eviction.
        engine.make_room(resident, 1)
        engine.make_room(resident, 1 + resident.config.retrieved)
        session = resident.session
        if not resident.config.retrieved or engine.cache.holds_all(resident.slot, session.length):
            return
        found = self.retriever
        if found is not None and found.evictions == session.evictions:
            return
        rows = yield from fill_host_copy(engine, resident, step.source)
        if rows is None:
            engine.metrics.inc("worker_retrieval_refused_total")
            self._refused = True
            return
        if self._retriever is None:
            self._retriever = Retriever(rows, settings, resident.config.retrieved, engine.group)
        self._retriever.count = resident.config.retrieved
        self._retriever.evictions = session.evictions
        self._retriever.ready = True

    def clear_turn(self) -> None:
        """Begin the turn's counts anew; no step retrieves before one is prepared again."""
        self._refused = False
        if self._retriever is not None:
            self._retriever.begin_turn()

    def drop_host_copy(self) -> None:
        """Drop the retriever, whose rows are freed."""
        self._retriever = None

    def report(self, done: pb.TurnDone, group: Group) -> None:
        """Report what the turn's steps retrieved, if any did, or that they could not."""
        counts = RetrievalCounts() if self._retriever is None else self._retriever.counts
        if counts.steps or self._refused:
            done.retrieval.CopyFrom(
                pb.RetrievalReport(
                    steps=counts.steps,
                    rows=sum(group.gather(counts.rows)),
                    seconds=counts.seconds,
                    refused=self._refused,
                )
            )
