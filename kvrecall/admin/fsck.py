"""What the catalog says there should be, against the pages that there are: pure, in words an operator reads."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvrecall.domain.session import SharedPages
from kvstore.format.page import PageKey, PageLayout
from kvstore.fsck import PagesReport, StoredPage

REBUILT = "computed again from the turn log at the session's next use"
NOT_REBUILT = "lost: its turn log is not whole"
DROPPED = "left over; dropped at the next start"
EXPIRES = "left over; expires in Redis as nobody uses it"
CUT = "cut off at the next start; nothing of it was acknowledged"


@dataclass(frozen=True)
class Finding:
    """Something found: where, what, and what will become of it. What is no `problem` is how a crash leaves things."""

    where: str
    what: str
    then: str
    problem: bool = True


@dataclass(frozen=True)
class KnownSession:
    """What the catalog says of a session: `length` rows are committed, `logged` tokens stand in its turns.

    `said` tokens should: those with rows and those that are still to be computed.
    """

    id: str
    epoch: int
    length: int
    shared: tuple[SharedPages, ...]
    logged: int
    said: int

    @property
    def log_is_whole(self) -> bool:
        """Whether every row can be computed again."""
        return self.logged == self.said

    def owner(self, index: int) -> str:
        """Who wrote a page of the session."""
        return next((each.owner for each in self.shared if index < each.pages), self.id)

    @property
    def shared_pages(self) -> int:
        """How many pages, from the first on, others wrote."""
        return max((each.pages for each in self.shared), default=0)


@dataclass(frozen=True)
class Stored:
    """The pages of all tiers together: of each the newest version counts, and it is whole if one tier has it so."""

    pages: Mapping[PageKey, Sequence[StoredPage]]
    page_tokens: int
    own: Container[PageKey] = frozenset()
    """Pages in tiers that only one worker uses: it drops there what the catalog does not know."""

    def only_shared(self, key: PageKey) -> bool:
        """Whether a page lies only where other workers may use it too."""
        return key not in self.own

    def missing(self, key: PageKey, tokens: int) -> str:
        """Why the first `tokens` rows of a page cannot be read; empty if they can."""
        found = self.pages.get(key, ())
        if not found:
            return "missing"
        newest = max(page.header.sequence for page in found)
        counted = [page for page in found if page.header.sequence == newest]
        whole = [page for page in counted if not page.damage]
        if not whole:
            return f"unreadable: {counted[0].damage}"
        valid = whole[0].header.valid_tokens
        return "" if valid >= tokens else f"with {valid} of {tokens} rows"


def stored(reports: Sequence[PagesReport]) -> Stored:
    """The pages of all tiers."""
    pages: dict[PageKey, list[StoredPage]] = {}
    for report in reports:
        for key, page in report.pages.items():
            pages.setdefault(key, []).append(page)
    sizes = [page.header.page_tokens for found in pages.values() for page in found]
    own = {key for report in reports if report.segments for key in report.pages}
    return Stored(pages, max(sizes, default=PageLayout.page_tokens), own)


def tier_findings(report: PagesReport) -> Iterator[Finding]:
    """What is wrong with a tier by itself."""
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
                "pages written before it are taken for out of date and " + REBUILT,
            )
        if segment.corrupt:
            what = _count(segment.corrupt, "damaged record") + " that no longer counted"
            yield Finding(
                segment.name, what, "nobody reads it; it goes with its file", problem=False
            )
        if segment.torn_bytes:
            yield Finding(
                segment.name, f"{segment.torn_bytes} bytes at its end are torn", CUT, problem=False
            )


def session_findings(session: KnownSession, found: Stored) -> Iterator[Finding]:
    """Pages of a session that are not there in full, and a turn log that does not add up."""
    where = f"session {session.id}"
    if not session.log_is_whole:
        what = f"its turns have {session.logged} tokens, its state says {session.said}"
        yield Finding(where, what, "put back a copy of the catalog: it is the truth")
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
        what = f"{_pages(later)} of a later epoch than the catalog's {session.epoch}: it is older than the pages"
        yield Finding(where, what, "do not serve: put back the catalog that belongs to these pages")


def leftover_findings(
    sessions: Sequence[KnownSession], kept: Sequence[SharedPages], found: Stored
) -> list[Finding]:
    """Pages beyond what was committed, and pages that belong to no session."""
    lengths = {session.id: _page_count(session, found) for session in sessions}
    findings = []
    for owner, keys in groupby(leftovers(sessions, kept, found), key=lambda key: key.session):
        indices = [key.index for key in keys]
        if owner in lengths:
            what = f"{_pages(indices)} written, never committed"
            findings.append(Finding(f"session {owner}", what, CUT, problem=False))
        else:
            then = EXPIRES if found.only_shared(PageKey(owner, indices[0])) else DROPPED
            findings.append(Finding(f"owner {owner}", f"{_pages(indices)} of no session", then))
    return findings


def leftovers(
    sessions: Sequence[KnownSession], kept: Sequence[SharedPages], found: Stored
) -> list[PageKey]:
    """Stored pages that nobody needs: behind a session's end, or of none that is there, but for what others share."""
    needed = {session.id: _page_count(session, found) for session in sessions}
    for each in (*kept, *(shared for session in sessions for shared in session.shared)):
        needed[each.owner] = max(needed.get(each.owner, 0), each.pages)
    return sorted(key for key in found.pages if key.index >= needed.get(key.session, 0))


def _missing(session: KnownSession, found: Stored) -> Iterator[tuple[int, str]]:
    for index in range(_page_count(session, found)):
        tokens = min(found.page_tokens, session.length - index * found.page_tokens)
        owner = session.owner(index)
        if reason := found.missing(PageKey(owner, index), tokens):
            yield index, reason if owner == session.id else f"written by {owner} {reason}"


def _is_later(session: KnownSession, index: int, found: Stored) -> bool:
    return any(
        page.header.epoch > session.epoch
        for page in found.pages.get(PageKey(session.id, index), ())
    )


def _page_count(session: KnownSession, found: Stored) -> int:
    return -(-session.length // found.page_tokens)


def _by_reason(reasons: Iterator[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    by_reason: dict[str, list[int]] = {}
    for index, reason in reasons:
        by_reason.setdefault(reason, []).append(index)
    return list(by_reason.items())


def _pages(indices: Sequence[int]) -> str:
    """Page 3, or pages 3 to 5 and 7."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] == index - 1:
            runs[-1][1:] = [index]
        else:
            runs.append([index])
    told = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    some = (
        ", ".join(told)
        if len(told) < _MOST_RUNS
        else f"{', '.join(told[:_MOST_RUNS])} and more, {len(indices)} in all"
    )
    return f"page {some}" if len(indices) == 1 else f"pages {some}"


_MOST_RUNS = 6


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
