"""Consistency check of a store: the tiers hold exactly the pages of the sessions' page tables."""

from dataclasses import dataclass, field

from kvstore.errors import InvariantError
from kvstore.format.page import PageKey
from kvstore.sessions.context import StoreContext
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.state import StoredSession


@dataclass(eq=False)
class _Expected:
    """Pages that the sessions in memory have.

    `pages` must be stored in that version; `optional` may be stored: shared and missing pages.
    """

    sessions: set[str] = field(default_factory=set)
    pages: dict[PageKey, int] = field(default_factory=dict)
    optional: set[PageKey] = field(default_factory=set)

    def add(self, state: StoredSession) -> None:
        self.sessions.add(state.name)
        versions = state.table.known_sequences()
        for stored in range(state.table.stored_pages):
            key = state.table.stored_key(stored)
            sequence = versions.get(stored)
            if key.session != state.name or sequence is None:
                self.optional.add(key)
            else:
                self.pages[key] = sequence


def check_store(context: StoreContext, sessions: SessionDirectory) -> None:
    """Raise InvariantError unless the tiers hold every page of every session and no other page.

    In a shared lowest tier only the pages of sessions in memory are checked. The writer must be
    idle.
    """
    expected = _Expected()
    for state in sessions.states():
        with state.lock:
            _check_session(state, context.layout.page_tokens)
            expected.add(state)
    _check_lowest(context, sessions, expected)
    _check_copies(context, sessions, expected)


def _check_lowest(context: StoreContext, sessions: SessionDirectory, expected: _Expected) -> None:
    lowest = context.stack.tiers.lowest
    listed = sorted(expected.sessions) if lowest.shared else [None]
    stored = {
        header.key: header.sequence for session in listed for header in lowest.stored(session)
    }
    differing = {key for key, sequence in expected.pages.items() if stored.get(key) != sequence}
    missing = differing - context.stack.placement.pending_keys()
    unknown = stored.keys() - expected.pages.keys() - expected.optional
    orphaned = {key for key in unknown if not _is_allowed(sessions, key)}
    if missing or orphaned:
        raise InvariantError(
            f"tier {lowest.name}: missing or stale pages {sorted(missing)}, "
            f"orphaned pages {sorted(orphaned)}, of {len(expected.pages)}"
        )


def _check_copies(context: StoreContext, sessions: SessionDirectory, expected: _Expected) -> None:
    known = expected.pages.keys() | expected.optional
    for tier in context.stack.tiers.all[:-1]:
        stored = {header.key for header in tier.stored()}
        if context.stack.tiers.lowest.shared:
            stored = {key for key in stored if key.session in expected.sessions}
        if orphaned := {key for key in stored - known if not _is_allowed(sessions, key)}:
            raise InvariantError(f"tier {tier.name} holds orphaned pages: {sorted(orphaned)}")


def _is_allowed(sessions: SessionDirectory, key: PageKey) -> bool:
    """Return whether an unreferenced page may be stored: retained, or of an unopened session."""
    return key.index < sessions.retained_pages(key.session) or sessions.is_unopened(key.session)


def _check_session(state: StoredSession, page_tokens: int) -> None:
    pages = len(state.table) + len(state.behind)
    if pages != -(-state.length // page_tokens):
        raise InvariantError(
            f"session {state.name!r}: {state.length} tokens, but {len(state.table)} pages were "
            f"submitted, and {len(state.behind)} are in memory alone"
        )
