"""Reports the rows and bytes of a session, active and stored."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.selection import Selection
from workers.engine.session import WorkerSession
from workers.model.loader import LoadedModel
from workers.parallel.group import Group


def build_report(
    session: WorkerSession,
    selection: Selection | None,
    bound: list[int],
    model: LoadedModel,
    tier_bytes: dict[str, int],
) -> pb.MemoryReport:
    """Build the report of a session.

    selection: the rows that are active now. bound: rows per head and layer. Rows per layer are the
    mean over its heads, rounded up. tier_bytes: bytes per storage tier, of all sessions.
    """
    active = selection.rows_per_head() if selection else [0] * model.shape.n_layers
    rows = sum(selection.row_counts()) if selection else 0
    fully_active = selection.fully_active_tokens() if selection else 0
    return pb.MemoryReport(
        length=session.length,
        budget=session.config.budget,
        active_rows=active,
        peak_rows=session.peak or active,
        bound_rows=bound,
        active_bytes=rows * model.shape.row_bytes(model.dtype),
        evicted_rows=session.length - fully_active,
        unsettled=session.unsettled,
        dropped_tokens=session.dropped_tokens,
        promoted_rows=session.promoted_rows,
        tier_bytes=tier_bytes,
        in_slot=session.slot is not None,
        retrieval_bytes=0 if session.host_copy is None else session.host_copy.nbytes,
    )


def join_report(report: pb.MemoryReport, group: Group) -> pb.MemoryReport:
    """Join what ranks report of their own heads and stores: bytes add up, peaks are means, rounded up."""
    if group.count == 1:
        return report
    parts = group.gather(report)
    peaks = zip(*(part.peak_rows for part in parts), strict=True)
    joined = pb.MemoryReport()
    joined.CopyFrom(report)
    joined.peak_rows[:] = [-(-sum(rows) // group.count) for rows in peaks]
    joined.retrieval_bytes = sum(part.retrieval_bytes for part in parts)
    for tier in report.tier_bytes:
        joined.tier_bytes[tier] = sum(part.tier_bytes[tier] for part in parts)
    return joined
