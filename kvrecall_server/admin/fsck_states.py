"""Comparison of the catalog with the stored recurrent states: pure, with findings for operators.

A state is a page of one row, in tiers of its own, under the id of the page of rows that it follows.
The next turn begins with the state at its session's end; the others serve forks and sessions that
begin alike.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvrecall_server.admin.fsck import (
    MISSING,
    Finding,
    KnownSession,
    Stored,
    list_numbers,
    report_loss,
)
from kvstore.fsck import PagesReport

_NOT_NEEDED = "not needed by the session; what else begins with it computes it again"


def label_states(report: PagesReport) -> PagesReport:
    """Name a tier of states and its files otherwise than those of pages."""
    segments = tuple(replace(each, name=f"states/{each.name}") for each in report.segments)
    return replace(report, tier=f"states in {report.tier}", segments=segments)


def state_findings(
    session: KnownSession, found: Stored, page_tokens: int, *, restored: bool = False
) -> Iterator[Finding]:
    """States that a session has lost; page_tokens: of the pages of rows, restored: the catalog is a backup."""
    if not session.snapshots:
        return
    where = f"session {session.id}"
    losses = {}
    for index, at in enumerate(session.snapshots):
        last = at // page_tokens - 1
        known = 0 <= last < len(session.pages)
        if reason := found.find_loss(session.pages[last]) if known else MISSING:
            losses[index] = reason
    lost = MISSING
    if session.length in session.snapshots:
        lost = losses.pop(session.snapshots.index(session.length), "")
    if session.length and lost:
        what = f"the state after {session.length} tokens {lost}"
        yield report_loss(session, what, lost, restored)
    damaged = [index for index, reason in losses.items() if reason != MISSING]
    if damaged:
        yield Finding(where, f"{list_numbers(damaged, 'state')} unreadable", _NOT_NEEDED)
