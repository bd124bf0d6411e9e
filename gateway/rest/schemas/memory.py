"""Memory of a session: rows per layer, bytes per tier."""

from typing import Any

from gateway.rest.schemas.base import View
from gateway.rest.schemas.repairs import RepairTotalsView, RepairView
from kvrecall.domain.reports import MemoryReport, TurnOutcome


class TurnMemoryView(View):
    """Memory of a session after a turn. Active, peak and bound rows are the largest layer's."""

    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: dict[str, int]
    repair: RepairTotalsView
    repairs: list[RepairView]

    @classmethod
    def from_domain(cls, outcome: TurnOutcome) -> "TurnMemoryView":
        """Convert from a turn's memory and the repairs since the previous turn."""
        return cls(
            **_counts(outcome.memory),
            repair=RepairTotalsView.from_domain(outcome.repairs, outcome.repairs_skipped),
            repairs=[RepairView.model_validate(repair) for repair in outcome.repairs],
        )


class MemoryView(View):
    """Current memory of a session. Active, peak and bound rows are the largest layer's.

    `in_slot`: the active rows are resident in a slot of the worker. `retrieval_bytes`: of its host, of
    the rows that answers and repairs search, and their index.
    """

    session: str
    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: dict[str, int]
    layer_active_rows: list[int]
    layer_peak_rows: list[int]
    layer_bound_rows: list[int]
    in_slot: bool
    retrieval_bytes: int

    @classmethod
    def from_domain(cls, session: str, memory: MemoryReport) -> "MemoryView":
        """Convert from a session's memory report."""
        return cls(
            **_counts(memory),
            session=session,
            layer_active_rows=list(memory.layer_active_rows),
            layer_peak_rows=list(memory.layer_peak_rows),
            layer_bound_rows=list(memory.layer_bound_rows),
            in_slot=memory.in_slot,
            retrieval_bytes=memory.retrieval_bytes,
        )


def _counts(memory: MemoryReport) -> dict[str, Any]:
    return {
        name: getattr(memory, name)
        for name in TurnMemoryView.model_fields
        if name not in ("repair", "repairs")
    }
