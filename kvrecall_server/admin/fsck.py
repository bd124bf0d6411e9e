"""Comparison of the catalog with the stored pages: pure, with findings as text for operators."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvrecall.domain.page_ids import PageId
from kvstore.format.page import PageLayout
from kvstore.fsck import PagesReport, StoredPage

MISSING = "missing"
REBUILT = "computed again from the turn log at the session's next use"
NOT_REBUILT = "lost: its turn log is incomplete"
SWEPT = "left of turns that were not committed; deleted by the service's next sweeps"
DEAD = "of deleted sessions and rewritten turns; deleted once the service runs"
EXPIRES = "left over; expires in Redis, where it is not used"
MANY = (
    "the catalog may have lost their sessions: restore a backup of it. If it is one, check with "
    "--restored. Nothing deletes them until it knows them, or KVRECALL_SERVICE__MAX_UNKNOWN_SHARE is 1"
)
HELD = (
    "newer than the restored catalog. Clients that send their histories again use them; the service "
    "holds the others until a gateway starts with KVRECALL_SERVICE__MAX_UNKNOWN_SHARE=1, or "
    "--restored --repair deletes them"
)
UNREADABLE = "cannot be decrypted any more; delete it"
BAD_SESSION = "restore a backup of the catalog: it is authoritative"
TRUNCATED = "truncated at the next start; nothing of it was acknowledged"


@dataclass(frozen=True)
class Finding:
    """A finding: where, what, and its consequence.

    Not a `problem`: a state that a crash or a deletion may leave and that the service resolves.
    """

    where: str
    what: str
    then: str
    problem: bool = True


@dataclass(frozen=True)
class KnownSession:
    """A session in the catalog: `length` rows committed, in `pages` by their order.

    Of one whose data key was deleted the length is not known: None.

    `log_is_whole`: every row can be computed again from the turn log. `snapshots`: rows before each of
    its recurrent states, as its worker's state has them.
    """

    id: str
    length: int | None
    pages: tuple[PageId, ...]
    log_is_whole: bool
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stored:
    """The pages of all tiers together; a page is intact if one tier has an intact copy of it."""

    pages: Mapping[PageId, Sequence[StoredPage]]
    page_tokens: int
    # Pages that do not expire by themselves: workers' sweeps delete those that no session has.
    own: Container[PageId] = frozenset()

    def find_loss(self, page_id: PageId) -> str:
        """The reason why a page cannot be read; empty if it can."""
        copies = self.pages.get(page_id, ())
        if not copies:
            return MISSING
        return "" if any(not page.damage for page in copies) else f"unreadable: {copies[0].damage}"


@dataclass(frozen=True)
class Leftovers:
    """Stored pages that no session has, sorted: `dead` ones, which the catalog is about to delete, and others.

    are_many: The others are more than crashes leave. are_newer: That many, and the catalog is a backup.
    """

    dead: tuple[PageId, ...]
    unknown: tuple[PageId, ...]
    are_many: bool = False
    are_newer: bool = False


def merge_reports(reports: Sequence[PagesReport]) -> Stored:
    """Merge the reports of all tiers."""
    pages: dict[PageId, list[StoredPage]] = {}
    for report in reports:
        for page_id, page in report.pages.items():
            pages.setdefault(page_id, []).append(page)
    sizes = [page.header.page_tokens for found in pages.values() for page in found]
    own = {page_id for report in reports if not report.expires for page_id in report.pages}
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
                "what was there is missing; pages that were deleted there may be back, and are swept",
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


def session_findings(
    session: KnownSession, found: Stored, *, restored: bool = False
) -> Iterator[Finding]:
    """Missing pages of a session; of one from a `restored` catalog they may have been deleted since."""
    where = f"session {session.id}"
    rows = len(session.pages) * found.page_tokens
    if session.length not in (None, rows):
        yield Finding(where, f"{session.length} rows, and pages of {rows}", BAD_SESSION)
    losses = [(index, found.find_loss(page_id)) for index, page_id in enumerate(session.pages)]
    for reason, indices in _by_reason((index, reason) for index, reason in losses if reason):
        yield report_loss(session, f"{list_numbers(indices, 'page')} {reason}", reason, restored)


def report_loss(session: KnownSession, what: str, reason: str, restored: bool) -> Finding:
    """Report lost rows: no problem if they are `missing`, the log has them, and the catalog is a backup."""
    then = REBUILT if session.log_is_whole else NOT_REBUILT
    expected = restored and session.log_is_whole and reason == MISSING
    return Finding(f"session {session.id}", what, then, problem=not expected)


def find_leftovers(
    sessions: Sequence[KnownSession],
    dead: Collection[PageId],
    found: Stored,
    *,
    max_unknown: int,
    max_share: float,
    restored: bool = False,
) -> Leftovers:
    """Find the stored pages, or states, that no session has.

    They are many if they are more than `max_unknown` and more than that share of all: a loss, unless
    the catalog was `restored` from a backup.
    """
    known = {page_id for session in sessions for page_id in session.pages}
    left = found.pages.keys() - known
    unknown = left.difference(dead)
    are_many = len(unknown) > max(max_unknown, max_share * len(found.pages))
    return Leftovers(
        tuple(sorted(left.intersection(dead))),
        tuple(sorted(unknown)),
        are_many=are_many and not restored,
        are_newer=are_many and restored,
    )


def leftover_findings(left: Leftovers, found: Stored, noun: str = "page") -> Iterator[Finding]:
    """Pages, or states, of no session."""
    what = "of no session"
    if left.are_many:
        yield Finding("catalog", f"{_count(len(left.unknown), noun)} {what}", MANY)
        left = Leftovers(left.dead, ())
    own = [page_id for page_id in left.unknown if page_id in found.own]
    dead = [page_id for page_id in left.dead if page_id in found.own]
    elsewhere = len(left.unknown) + len(left.dead) - len(own) - len(dead)
    then_own = HELD if left.are_newer else SWEPT
    for count, then in ((len(own), then_own), (len(dead), DEAD), (elsewhere, EXPIRES)):
        if count:
            yield Finding("tiers", f"{_count(count, noun)} {what}", then, problem=False)


def _by_reason(reasons: Iterator[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    by_reason: dict[str, list[int]] = {}
    for index, reason in reasons:
        by_reason.setdefault(reason, []).append(index)
    return list(by_reason.items())


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
