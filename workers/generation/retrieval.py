"""Preparation of a session's steps for retrieval: room in the slot, and rows in the arena."""

from workers.engine.activation import RowSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.host_copy import fill_host_copy
from workers.generation.steps import Steps
from workers.retrieval.retriever import Retriever


def prepare_retrieval(
    engine: Engine, resident: ResidentSession, source: RowSource | None = None
) -> Steps[None]:
    """Prepare the session's next step, of one token, to retrieve.

    Afterwards every row of the session is active, or in the arena. What is retrieved is therefore a
    function of the session's tokens alone, however far writes have come.

    Nothing happens for a session without retrieval, while all rows are active, and where there is
    no memory for its arena: the turn then goes on without retrieval. Yields between copies. source:
    of the rows, the engine's store unless given. Raises the errors of the store.
    """
    session = resident.session
    if resident.config.retrieval is None or session.retrieval_refused:
        return
    engine.make_room(resident, 1)  # an automatic budget begins to retrieve with its first eviction
    engine.make_room(resident, 1 + resident.config.retrieved)
    if not resident.config.retrieved or engine.cache.holds_all(resident.slot, session.length):
        return
    retriever = session.retriever
    if retriever is not None and retriever.ready and retriever.evictions == session.evictions:
        return
    rows = yield from fill_host_copy(engine, resident, source)
    if rows is None:
        engine.metrics.inc("worker_retrieval_refused_total")
        session.retrieval_refused = True
        return
    if retriever is None:
        settings = resident.config.retrieval
        assert settings is not None, "rows are retrieved only with settings"
        retriever = Retriever(rows, settings, resident.config.retrieved)
        session.retriever = retriever
    retriever.count = resident.config.retrieved
    retriever.evictions = session.evictions
    retriever.ready = True
