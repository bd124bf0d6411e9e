"""Capabilities of sessions: what they do beyond attending to their active rows.

A new one is a class here and its line in `CAPABILITIES`. Its settings are in `kvrecall/domain/settings/`
and its report in `kvrecall/client/models.py` (docs/architecture.md).
"""

from collections.abc import Callable, Sequence
from typing import cast

from workers.capabilities.capability import StepCapability
from workers.capabilities.reselections import Reselections
from workers.capabilities.row_retrieval import RowRetrieval
from workers.capabilities.sparse_prefill import SparsePrefill
from workers.engine.session import WorkerSession

# In the order in which they prepare a step: rows are retrieved beside those that were selected anew.
CAPABILITIES: tuple[Callable[[], StepCapability], ...] = (SparsePrefill, Reselections, RowRetrieval)


def attach(session: WorkerSession) -> Sequence[StepCapability]:
    """Return the session's capabilities, with their state, created with its first turn."""
    if not session.capabilities:
        session.capabilities = tuple(create() for create in CAPABILITIES)
    # No one else sets them: the engine, which is below this package, knows their protocol alone.
    return cast("Sequence[StepCapability]", session.capabilities)
