"""Bytes of the catalog: of worker states by their form, of the rest by what was measured."""

from dataclasses import dataclass

from kvrecall.domain.sessions.automatic_budget import choose_budget
from kvrecall.domain.settings.retrieval import Retrieval
from services.catalog.records import KEPT_INTERVAL
from workers.engine.settings import WorkerSettings

# Of an active row in a state: position and mark of a promotion. Of an evicted token: position and score.
_ROW_BYTES = 4 + 1
_SCORE_BYTES = 4 + 4
# Name, type, shape and place of a tensor, of which each layer has two.
_TENSOR_BYTES = 80
# Text of a token, of the last turn's messages: the next rendering builds on them.
_TEXT_BYTES = 4
# A kept state over the current one, at most: it is packed.
PACKED = 0.3


@dataclass(frozen=True)
class CatalogBytes:
    """Bytes of a session, of each of its turns and of each token, without worker states."""

    session: int
    turn: int
    token: float


# As `python -m benchmarks catalog` has measured them (`benchmarks/results/catalog.json`).
IN_FILE = CatalogBytes(session=1_200, turn=5_100, token=7.4)
IN_REDIS = CatalogBytes(session=3_700, turn=2_150, token=8.4)


def get_catalog_bytes(
    known: CatalogBytes, state_bytes: int, turns: int, tokens: int, kept: int
) -> int:
    """Return the bytes of a session of so many turns and tokens; kept: the setting `kept_states`."""
    states = state_bytes * (1 + PACKED * count_kept(turns, kept))
    return round(known.session + turns * known.turn + tokens * known.token + states)


def count_kept(turns: int, kept: int) -> int:
    """Count the states that are kept of so many turns: of the last ones, and of some before."""
    return min(turns, kept + max(0, turns - kept) // KEPT_INTERVAL) if kept else 0


def get_worker_state_bytes(
    layers: int, heads: int, tokens: int, turns: int, settings: WorkerSettings
) -> int:
    """Return the bytes of a session's state in the catalog, at most, with recall and an automatic budget.

    layers, heads: Of the model, those whose rows are selected.
    """
    budget = tokens if tokens <= settings.max_budget else choose_budget(tokens, settings.max_budget)
    retrieved = 0 if tokens <= budget else Retrieval().rows(budget, settings.min_budget)
    rows = budget - retrieved
    scores = min(tokens - rows, budget) * _SCORE_BYTES
    selection = layers * (heads * rows * _ROW_BYTES + 2 * _TENSOR_BYTES)
    return selection + scores + tokens // turns * _TEXT_BYTES
