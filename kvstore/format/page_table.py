"""Page table of a session: the key and the version of each of its pages.

A fork begins with pages that other sessions wrote. These are stored once, under the session that
wrote them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import MissingPageError, RowRangeError
from kvstore.format.commit_history import ALL_COMMITTED, CommitHistory
from kvstore.format.page import PageHeader, PageKey, PageLayout


@dataclass(frozen=True)
class SharedPages:
    """Reference to the pages before index `pages` that `owner` wrote.

    In a sequence of entries, pages that an earlier entry covers belong to that entry's owner.
    `history`: the owner's commits, as far as the referenced pages need them.
    """

    owner: str
    pages: int
    history: CommitHistory = ALL_COMMITTED


@dataclass(frozen=True)
class ExpectedPage:
    """A page in the only version that may be read.

    `shared`: another session wrote the page. Its rows never change, so a later version, which was
    restored, has the same rows.
    """

    key: PageKey
    sequence: int
    shared: bool = False

    def matches(self, header: PageHeader, layout: PageLayout) -> bool:
        """Return whether a stored page with this header may be read as the expected one."""
        if self.shared:
            return header.sequence >= self.sequence and header.valid_tokens == layout.page_tokens
        return header.sequence == self.sequence


@dataclass(frozen=True, slots=True)
class PageVersion:
    """Names rows that never change; `sequence` None: of a page that is in memory alone, whose rows may."""

    key: PageKey
    sequence: int | None

    @property
    def final(self) -> bool:
        """True if all readers of this version get the same rows."""
        return self.sequence is not None


class PageTable:
    """Versions of the pages of one session that were submitted to be stored, in order.

    The session wrote every page that is not in `shared`. A page whose version is unknown is
    missing.

    A page is stored under its number among all that the session has written, the dropped ones
    included: no number is used twice, so what other sessions share stays as it is. `dropped` are the
    numbers of pages that the session has no more, ascending. Indices are those of the pages that it
    has; `stored_index` turns one into a number.
    """

    def __init__(
        self,
        session: str,
        shared: Sequence[SharedPages] = (),
        sequences: Sequence[int | None] = (),
        dropped: Sequence[range] = (),
    ) -> None:
        self.session = session
        self.shared = tuple(shared)
        self.dropped = tuple(dropped)
        self._sequences = list(sequences)

    def __len__(self) -> int:
        return len(self._sequences) - sum(map(len, self.dropped))

    @property
    def stored_pages(self) -> int:
        """Number of pages that were written, the dropped ones included."""
        return len(self._sequences)

    @property
    def shared_pages(self) -> int:
        """Number of leading written pages that other sessions wrote."""
        return max((entry.pages for entry in self.shared), default=0)

    @property
    def owners(self) -> set[str]:
        """The session and the sessions whose pages it shares."""
        return {self.session} | {entry.owner for entry in self.shared}

    def stored_index(self, index: int) -> int:
        """Number under which the page of an index is stored."""
        return skip_dropped(index, self.dropped)

    def count_stored(self, pages: int) -> int:
        """Number of pages that were written when the session has `pages`, behind all dropped ones."""
        return pages + sum(map(len, self.dropped))

    def key(self, index: int) -> PageKey:
        """Key under which the page is stored, whether it exists or not."""
        return self.stored_key(self.stored_index(index))

    def stored_key(self, stored: int) -> PageKey:
        """Key of a page by the number under which it is stored."""
        entry = self.stored_entry(stored)
        return PageKey(self.session if entry is None else entry.owner, stored)

    def shared_entry(self, index: int) -> SharedPages | None:
        """Reference that covers the page; None for a page of the session itself."""
        return self.stored_entry(self.stored_index(index))

    def stored_entry(self, stored: int) -> SharedPages | None:
        """Reference that covers the page of a number; None for a page of the session itself."""
        return next((entry for entry in self.shared if stored < entry.pages), None)

    def sequence(self, index: int) -> int | None:
        """Sequence number of the version that may be read; None when the page is missing."""
        return self._sequences[self.stored_index(index)]

    def expected(self, index: int) -> ExpectedPage:
        """Key and version of a page. Raises MissingPageError when its version is unknown."""
        key = self.key(index)
        sequence = self.sequence(index)
        if sequence is None:
            raise MissingPageError(
                f"page {index} of session {self.session!r} was not found; its rows must be "
                "computed again"
            )
        return ExpectedPage(key, sequence, shared=key.index < self.shared_pages)

    def known_sequences(self) -> dict[int, int]:
        """Sequence numbers of the known written pages, by the number under which they are stored."""
        return {
            stored: sequence
            for stored, sequence in enumerate(self._sequences)
            if sequence is not None
        }

    def version(self, index: int) -> PageVersion:
        """Version of a page that is stored, missing or not, or in memory alone."""
        stored = index < len(self)
        return PageVersion(self.key(index), self.sequence(index) if stored else None)

    def missing(self) -> list[int]:
        """Indices of the pages whose version is unknown."""
        return [index for index in range(len(self)) if self.sequence(index) is None]

    def own_keys(self, first: int = 0) -> list[PageKey]:
        """Keys of the session's own written pages from number `first` on, dropped ones included."""
        return [
            PageKey(self.session, stored)
            for stored in range(max(first, self.shared_pages), self.stored_pages)
        ]

    def append(self, sequence: int | None) -> None:
        """Add the next page; None when it is missing."""
        self._sequences.append(sequence)

    def put(self, index: int, sequence: int | None) -> None:
        """Set the version of a page; None when it is missing from now on."""
        self._sequences[self.stored_index(index)] = sequence

    def truncate(self, pages: int, dropped: Sequence[range] | None = None) -> list[PageKey]:
        """Keep the first `pages` pages and return the keys of the removed ones.

        dropped: of the session when it had these pages; None: as now. Raises RowRangeError when
        shared or dropped pages would be removed.
        """
        gaps = self.dropped if dropped is None else tuple(dropped)
        stored = pages + sum(map(len, gaps))
        if stored < max(self.shared_pages, *(gap.stop for gap in gaps), 0):
            raise RowRangeError(
                f"session {self.session!r} shares its first {self.shared_pages} pages; "
                f"it cannot be truncated to {pages} pages"
            )
        removed = self.own_keys(stored)
        self.dropped = gaps
        del self._sequences[stored:]
        return removed

    def drop(self, pages: int) -> None:
        """Go on behind the first `pages` pages; those that follow stay stored, under their numbers."""
        self.dropped = add_dropped(self.dropped, self.stored_index(pages), self.stored_pages)


def skip_dropped(index: int, dropped: Sequence[range]) -> int:
    """Count `index` things on from 0, past those of the ranges `dropped`, which ascend."""
    for gap in dropped:
        if index < gap.start:
            break
        index += len(gap)
    return index


def add_dropped(dropped: Sequence[range], start: int, stop: int) -> tuple[range, ...]:
    """Add the range from `start` to all there is (`stop`) to those that were dropped before."""
    before = [gap for gap in dropped if gap.start < start]
    if before and before[-1].stop == start:
        start = before.pop().start
    return (*before, range(start, stop)) if start < stop else tuple(before)
