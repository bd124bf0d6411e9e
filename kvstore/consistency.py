"""Consistency check of a store: the tiers hold every page of the open sessions."""

from kvstore.errors import InvariantError
from kvstore.sessions.context import StoreContext
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.state import StoredSession


def check_store(context: StoreContext, sessions: SessionDirectory) -> None:
    """Raise InvariantError unless every page of every open session is stored. The writer must be idle."""
    for state in sessions.states():
        with state.lock:
            _check_session(state, context.layout.page_tokens)
            present = [page_id for page_id in state.pages if page_id not in state.missing]
        absent = set(present) - context.stack.find(present, ask=True)
        if absent:
            names = sorted(page_id.hex() for page_id in absent)
            raise InvariantError(f"session {state.name!r}: no tier has pages {names}")


def _check_session(state: StoredSession, page_tokens: int) -> None:
    pages = len(state.pages) + len(state.behind)
    if pages != -(-state.length // page_tokens):
        raise InvariantError(
            f"session {state.name!r}: {state.length} tokens, but {len(state.pages)} pages were "
            f"submitted, and {len(state.behind)} are in memory alone"
        )
