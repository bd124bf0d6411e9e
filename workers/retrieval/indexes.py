"""The index of a layer's keys that a session's retrieval searches."""

from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from kvstore.index.base import KeyIndex
from kvstore.index.dci.settings import DciSettings
from kvstore.index.dci.tree import DciTree
from kvstore.index.summaries import KeySummaries

# Rows of a session up to which scoring all keys takes no longer than a descent, in native code.
_MOST_EXACT = 1 << 16


def create_index(settings: Retrieval, rows: int) -> KeyIndex | KeySummaries | None:
    """Create a layer's index for a session of so many rows per head; None: all are scored."""
    if settings.index == "tree":
        return DciTree(DciSettings(scan=settings.scan))
    return KeySummaries() if _summarises(settings, rows) else None


def index_bytes(settings: Retrieval, layout: PageLayout, rows: int) -> int:
    """Most bytes of the indexes of all layers for so many rows per head."""
    if settings.index == "tree":
        return layout.n_layers * DciTree.bytes_for(layout, DciSettings(scan=settings.scan), rows)
    return layout.n_layers * KeySummaries.bytes_for(layout, rows) * _summarises(settings, rows)


def _summarises(settings: Retrieval, rows: int) -> bool:
    return settings.index == "summaries" or (settings.index == "auto" and rows > _MOST_EXACT)
