"""Comparison of the catalog with the stored pages: pure, with findings as text for operators."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvrecall.domain.sessions.session import SharedPages
from kvrecall_server.admin.commit_history import find_writer
from kvstore.format.commit_history import ALL_COMMITTED, CommitHistory
from kvstore.format.page import PageKey, PageLayout
from kvstore.fsck import PagesReport, StoredPage
from workers.engine.stored.written import count_written

REBUILT = "computed again from the turn log at the session's next use"
NOT_REBUILT = "lost: its turn log is incomplete"
DELETED = "orphaned; deleted at the next start"
EXPIRES = "orphaned; expires in Redis, where it is not used"
BAD_SESSION = "restore a backup of the catalog: it is authoritative"
TRUNCATED = "truncated at the next start; nothing of it was acknowledged"


@dataclass(frozen=True)
class Finding:
    """A finding: where, what, and its consequence.

    Not a `problem`: a state that a crash may leave and that the next start resolves.
    """

    where: str
    what: str
    then: str
    problem: bool = True


@dataclass(frozen=True)
class KnownSession:
    """A session in the catalog: `length` rows committed.

    `log_is_whole`: every row can be computed again from the turn log. `history` tells which rows of
    its stored pages are committed ones. `snapshots`: of its recurrent states, as its worker's state
    has them. `dropped`: numbers of pages that it has written and has no more.
    """

    id: str
    epoch: int
    length: int
    shared: tuple[SharedPages, ...]
    log_is_whole: bool
    history: CommitHistory = ALL_COMMITTED
    snapshots: tuple[int, ...] = ()
    dropped: tuple[range, ...] = ()

    def owner(self, index: int) -> tuple[str, CommitHistory]:
        """The session that wrote a page, an ancestor or this session, and its commits."""
        return find_writer(index, self.id, self.history, self.shared)

    @property
    def shared_pages(self) -> int:
        """Number of leading pages that other sessions wrote."""
        return max((each.pages for each in self.shared), default=0)


@dataclass(frozen=True)
class Stored:
    """The pages of all tiers together.

    The newest version of a page counts; it is intact if one tier has an intact copy of it.
    """

    pages: Mapping[PageKey, Sequence[StoredPage]]
    page_tokens: int
    # Pages in tiers of a single worker, which deletes pages there that the catalog does not know.
    own: Container[PageKey] = frozenset()

    def only_shared(self, key: PageKey) -> bool:
        """True if a page is only in tiers that other workers share."""
        return key not in self.own

    def missing(self, key: PageKey, tokens: int, history: CommitHistory) -> str:
        """The reason why the first `tokens` rows of a page cannot be read; empty if they can."""
        found = self.pages.get(key, ())
        if not found:
            return "missing"
        newest = max(page.header.sequence for page in found)
        current = [page for page in found if page.header.sequence == newest]
        intact = [page for page in current if not page.damage]
        if not intact:
            return f"unreadable: {current[0].damage}"
        header = intact[0].header
        committed = history.committed_tokens(header.epoch) - key.index * self.page_tokens
        valid = max(0, min(header.valid_tokens, committed))
        return "" if valid >= tokens else f"with {valid} of {tokens} committed rows"


def merge_reports(reports: Sequence[PagesReport]) -> Stored:
    """Merge the reports of all tiers."""
    pages: dict[PageKey, list[StoredPage]] = {}
    for report in reports:
        for key, page in report.pages.items():
            pages.setdefault(key, []).append(page)
    sizes = [page.header.page_tokens for found in pages.values() for page in found]
    own = {key for report in reports if report.segments for key in report.pages}
    return Stored(pages, max(sizes, default=PageLayout.page_tokens), own)


def tier_findings(report: PagesReport) -> Iterator[Finding]:
    """Findings within one tier."""
    if report.accounting_error:
        yield Finding(
            report.tier, report.accounting_error, "pages that are not found are " + REBUILT
        )
    for segment in report.segments:
        if segment.damaged:
            what = (
                _count(segment.damaged, "stretch", "stretches") + " in which no record can be read"
            )
            yield Finding(
                segment.name,
                what,
                "pages written before it count as outdated and are " + REBUILT,
            )
        if segment.corrupt:
            what = _count(segment.corrupt, "damaged record") + " that no longer counted"
            yield Finding(segment.name, what, "not read; deleted with its file", problem=False)
        if segment.torn_bytes:
            yield Finding(
                segment.name,
                f"{segment.torn_bytes} bytes at its end are torn",
                TRUNCATED,
                problem=False,
            )


def session_findings(session: KnownSession, found: Stored) -> Iterator[Finding]:
    """Missing or incomplete pages of a session."""
    where = f"session {session.id}"
    for reason, indices in _by_reason(_missing(session, found)):
        yield Finding(
            where, f"{_pages(indices)} {reason}", REBUILT if session.log_is_whole else NOT_REBUILT
        )
    later = [
        index
        for index in range(session.shared_pages, _page_count(session, found))
        if _is_later(session, index, found)
    ]
    if later:
        what = (
            f"{_pages(later)} of a later epoch than the catalog's {session.epoch}: "
            "it is older than the pages"
        )
        yield Finding(where, what, "do not serve: restore the catalog that belongs to these pages")


def orphan_findings(
    sessions: Sequence[KnownSession], retained: Sequence[SharedPages], found: Stored
) -> list[Finding]:
    """Uncommitted pages behind a session's end, and pages of no session."""
    lengths = {session.id: _page_count(session, found) for session in sessions}
    findings = []
    for owner, keys in groupby(
        orphaned_pages(sessions, retained, found), key=lambda key: key.session
    ):
        indices = [key.index for key in keys]
        if owner in lengths:
            what = f"{_pages(indices)} written but not committed"
            findings.append(Finding(f"session {owner}", what, TRUNCATED, problem=False))
        else:
            then = EXPIRES if found.only_shared(PageKey(owner, indices[0])) else DELETED
            findings.append(Finding(f"owner {owner}", f"{_pages(indices)} of no session", then))
    return findings


def orphaned_pages(
    sessions: Sequence[KnownSession], retained: Sequence[SharedPages], found: Stored
) -> list[PageKey]:
    """Stored pages that no session uses, sorted by key.

    They lie behind a session's end or belong to no session, and no fork shares them.
    """
    needed = {session.id: _page_count(session, found) for session in sessions}
    for each in (*retained, *(shared for session in sessions for shared in session.shared)):
        needed[each.owner] = max(needed.get(each.owner, 0), each.pages)
    return sorted(key for key in found.pages if key.index >= needed.get(key.session, 0))


def _missing(session: KnownSession, found: Stored) -> Iterator[tuple[int, str]]:
    for index in range(_page_count(session, found)):
        if any(index in gap for gap in session.dropped):
            continue  # only forks and sessions that share it need it
        written = count_written(session.length, session.dropped, found.page_tokens)
        tokens = min(found.page_tokens, written - index * found.page_tokens)
        owner, history = session.owner(index)
        if reason := found.missing(PageKey(owner, index), tokens, history):
            yield index, reason if owner == session.id else f"written by {owner} {reason}"


def _is_later(session: KnownSession, index: int, found: Stored) -> bool:
    return any(
        page.header.epoch > session.epoch
        for page in found.pages.get(PageKey(session.id, index), ())
    )


def _page_count(session: KnownSession, found: Stored) -> int:
    """Number of pages that the session has written, the dropped ones included."""
    written = count_written(session.length, session.dropped, found.page_tokens)
    return -(-written // found.page_tokens)


def _by_reason(reasons: Iterator[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    by_reason: dict[str, list[int]] = {}
    for index, reason in reasons:
        by_reason.setdefault(reason, []).append(index)
    return list(by_reason.items())


def _pages(indices: Sequence[int]) -> str:
    return list_numbers(indices, "page")


def list_numbers(indices: Sequence[int], noun: str) -> str:
    """List numbers of pages or states: `page 3`, `pages 3 to 5, 7`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] == index - 1:
            runs[-1][1:] = [index]
        else:
            runs.append([index])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    listed = ", ".join(texts[:_MAX_RUNS])
    if len(texts) >= _MAX_RUNS:
        listed += f" and more, {len(indices)} in all"
    return f"{noun} {listed}" if len(indices) == 1 else f"{noun}s {listed}"


_MAX_RUNS = 6


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
