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
    """

    def __init__(
        self, session: str, shared: Sequence[SharedPages] = (), sequences: Sequence[int | None] = ()
    ) -> None:
        self.session = session
        self.shared = tuple(shared)
        self._sequences = list(sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def shared_pages(self) -> int:
        """Number of leading pages that other sessions wrote."""
        return max((entry.pages for entry in self.shared), default=0)

    @property
    def owners(self) -> set[str]:
        """The session and the sessions whose pages it shares."""
        return {self.session} | {entry.owner for entry in self.shared}

    def key(self, index: int) -> PageKey:
        """Key under which the page is stored, whether it exists or not."""
        entry = self.shared_entry(index)
        return PageKey(self.session if entry is None else entry.owner, index)

    def shared_entry(self, index: int) -> SharedPages | None:
        """Reference that covers the page; None for a page of the session itself."""
        return next((entry for entry in self.shared if index < entry.pages), None)

    def sequence(self, index: int) -> int | None:
        """Sequence number of the version that may be read; None when the page is missing."""
        return self._sequences[index]

    def expected(self, index: int) -> ExpectedPage:
        """Key and version of a page. Raises MissingPageError when its version is unknown."""
        key = self.key(index)
        sequence = self._sequences[index]
        if sequence is None:
            raise MissingPageError(
                f"page {index} of session {self.session!r} was not found; its rows must be "
                "computed again"
            )
        return ExpectedPage(key, sequence, shared=index < self.shared_pages)

    def version(self, index: int) -> PageVersion:
        """Version of a page that is stored, missing or not, or in memory alone."""
        stored = index < len(self._sequences)
        return PageVersion(self.key(index), self._sequences[index] if stored else None)

    def missing(self) -> list[int]:
        """Indices of the pages whose version is unknown."""
        return [index for index, sequence in enumerate(self._sequences) if sequence is None]

    def own_keys(self, first: int = 0) -> list[PageKey]:
        """Keys of the session's own pages from index `first` on."""
        return [
            PageKey(self.session, index)
            for index in range(max(first, self.shared_pages), len(self))
        ]

    def append(self, sequence: int | None) -> None:
        """Add the next page; None when it is missing."""
        self._sequences.append(sequence)

    def put(self, index: int, sequence: int | None) -> None:
        """Set the version of a page; None when it is missing from now on."""
        self._sequences[index] = sequence

    def truncate(self, pages: int) -> list[PageKey]:
        """Keep the first `pages` pages and return the keys of the removed ones.

        Raises RowRangeError when shared pages would be removed.
        """
        if pages < self.shared_pages:
            raise RowRangeError(
                f"session {self.session!r} shares its first {self.shared_pages} pages; "
                f"it cannot be truncated to {pages} pages"
            )
        removed = self.own_keys(pages)
        del self._sequences[pages:]
        return removed
