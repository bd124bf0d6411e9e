"""Comparison of the catalog with the stored recurrent states: pure, with findings for operators.

A state is a page of one row, in tiers of its own. The next turn begins with the state at its session's
end; the others serve forks and sessions that begin alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from kvrecall.domain.sessions.session import SharedPages
from kvrecall_server.admin.fsck import (
    DELETED,
    EXPIRES,
    NOT_REBUILT,
    REBUILT,
    TRUNCATED,
    Finding,
    KnownSession,
    Stored,
    list_numbers,
)
from kvstore.format.commit_history import ALL_COMMITTED
from kvstore.format.page import PageKey
from kvstore.fsck import PagesReport
from workers.engine.snapshots import count_stored
from workers.engine.stored.written import place_state

_NOT_NEEDED = "not needed by the session; what else begins with it computes it again"


def label_states(report: PagesReport) -> PagesReport:
    """Name a tier of states and its files otherwise than those of pages."""
    segments = tuple(replace(each, name=f"states/{each.name}") for each in report.segments)
    return replace(report, tier=f"states in {report.tier}", segments=segments)


def state_findings(
    sessions: Sequence[KnownSession],
    retained: Sequence[SharedPages],
    found: Stored,
    page_tokens: int,
) -> Iterator[Finding]:
    """States that sessions have lost, and states of no session; page_tokens: of the pages of rows."""
    for session in sessions:
        yield from _session_findings(session, found, page_tokens)
    stored = {session.id: len(session.snapshots) for session in sessions}
    orphans = orphaned_states(sessions, retained, found)
    for owner, keys in groupby(orphans, key=lambda key: key.session):
        indices = [key.index for key in keys]
        listed = list_numbers(indices, "state")
        if owner in stored:
            what = f"{listed} written but not committed"
            yield Finding(f"session {owner}", what, TRUNCATED, problem=False)
        else:
            then = EXPIRES if found.only_shared(PageKey(owner, indices[0])) else DELETED
            yield Finding(f"owner {owner}", f"{listed} of no session", then)


def orphaned_states(
    sessions: Sequence[KnownSession], retained: Sequence[SharedPages], found: Stored
) -> list[PageKey]:
    """Stored states that no session uses, sorted by key.

    A session's are those that it has committed. A deleted one keeps all while others share its pages.
    """
    stored = {session.id: len(session.snapshots) for session in sessions}
    shared = (*retained, *(each for session in sessions for each in session.shared))
    owners = {each.owner for each in shared}

    def is_used(key: PageKey) -> bool:
        return key.index < stored[key.session] if key.session in stored else key.session in owners

    return sorted(key for key in found.pages if not is_used(key))


def _session_findings(session: KnownSession, found: Stored, page_tokens: int) -> Iterator[Finding]:
    where = f"session {session.id}"
    last = None
    if session.snapshots and session.length:
        reason = "missing"
        place = place_state(session.length, session.dropped, page_tokens)
        if place in session.snapshots:
            last = _find_key(session, session.snapshots.index(place), page_tokens)
            reason = found.missing(last, 1, ALL_COMMITTED)
        if reason:
            what = f"the state after {session.length} tokens {reason}"
            yield Finding(where, what, REBUILT if session.log_is_whole else NOT_REBUILT)
    damaged = [
        index
        for index in range(len(session.snapshots))
        if (key := PageKey(session.id, index)) != last
        and key in found.pages
        and found.missing(key, 1, ALL_COMMITTED)
    ]
    if damaged:
        yield Finding(where, f"{list_numbers(damaged, 'state')} unreadable", _NOT_NEEDED)


def _find_key(session: KnownSession, index: int, page_tokens: int) -> PageKey:
    """Find the key of a session's state, which an ancestor may have written."""
    for each in session.shared:
        if index < count_stored(session.snapshots, each.pages * page_tokens):
            return PageKey(each.owner, index)
    return PageKey(session.id, index)
