"""Memory of a session: rows per layer, bytes per tier."""

from gateway.rest.schemas.public import copy_to
from gateway.rest.schemas.repairs import to_repair_totals
from kvrecall import client
from kvrecall.domain.reports import MemoryReport, TurnOutcome


def to_turn_memory(outcome: TurnOutcome) -> client.TurnMemory:
    """Convert a turn's memory and the repairs since the previous turn."""
    return copy_to(
        client.TurnMemory,
        outcome.memory,
        repair=to_repair_totals(outcome.repairs, outcome.repairs_skipped),
        repairs=tuple(copy_to(client.Repair, repair) for repair in outcome.repairs),
    )


def to_memory(session: str, memory: MemoryReport) -> client.Memory:
    """Convert a session's memory report."""
    return copy_to(client.Memory, memory, session=session)
