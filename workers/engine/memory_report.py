"""What a session holds, of every kind."""

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.engine.session import Selection, WorkerSession
from workers.model.loader import LoadedModel


def report(
    session: WorkerSession,
    selection: Selection | None,
    bound: list[int],
    model: LoadedModel,
    tier_bytes: dict[str, int],
) -> wire.MemoryReport:
    """selection: what is active now. bound: rows per head and layer. Rows per layer are the mean over its heads."""
    active = selection.held() if selection else [0] * model.shape.n_layers
    rows = sum(selection.rows()) if selection else 0
    return wire.MemoryReport(
        length=session.length,
        budget=session.budget,
        active_rows=active,
        peak_rows=session.peak or active,
        bound_rows=bound,
        active_bytes=rows * model.shape.row_bytes(model.dtype),
        evicted_rows=session.length
        - (selection.held_everywhere(session.length) if selection else 0),
        promoted_rows=session.promoted_rows,
        tier_bytes=tier_bytes,
        in_slot=session.slot is not None,
    )
