"""Which page of which session holds each page of a session's rows, and in which version.

A fork begins with pages that others wrote: they are named by whoever wrote them, so they are stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import LostPageError, RowRangeError
from kvstore.format.page import PageHeader, PageKey, PageLayout


@dataclass(frozen=True)
class SharedPages:
    """The pages before index `pages` are those that `owner` wrote, but for what an entry before this one covers."""

    owner: str
    pages: int


@dataclass(frozen=True)
class ExpectedPage:
    """A page in the one version that may be read.

    `shared`: another session wrote it. Its rows never change, so a later version, which somebody restored, is as good.
    """

    key: PageKey
    sequence: int
    shared: bool = False

    def is_met_by(self, header: PageHeader, layout: PageLayout) -> bool:
        """Whether a stored page is this one."""
        if self.shared:
            return header.sequence >= self.sequence and header.valid_tokens == layout.page_tokens
        return header.sequence == self.sequence


class PageTable:
    """The pages of one session that were handed over to be stored, in order; it wrote those that it does not share."""

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
        """How many pages, from the first on, others wrote."""
        return max((entry.pages for entry in self.shared), default=0)

    @property
    def owners(self) -> set[str]:
        """The session and those whose pages it shares."""
        return {self.session} | {entry.owner for entry in self.shared}

    def key(self, index: int) -> PageKey:
        """What the page is stored as, whether it is there or not."""
        return PageKey(
            next((entry.owner for entry in self.shared if index < entry.pages), self.session), index
        )

    def sequence(self, index: int) -> int | None:
        """The version that counts; None when it is not known, so the page is lost."""
        return self._sequences[index]

    def expected(self, index: int) -> ExpectedPage:
        """The page as it may be read. Raises LostPageError when its version is not known."""
        key = self.key(index)
        sequence = self._sequences[index]
        if sequence is None:
            raise LostPageError(
                f"page {index} of session {self.session!r} was not found; its rows must be "
                "computed again"
            )
        return ExpectedPage(key, sequence, shared=index < self.shared_pages)

    def lost(self) -> list[int]:
        """The pages whose version is not known."""
        return [index for index, sequence in enumerate(self._sequences) if sequence is None]

    def own_keys(self, first: int = 0) -> list[PageKey]:
        """The session's own pages from index `first` on."""
        return [
            PageKey(self.session, index)
            for index in range(max(first, self.shared_pages), len(self))
        ]

    def append(self, sequence: int | None) -> None:
        """The page after the last."""
        self._sequences.append(sequence)

    def put(self, index: int, sequence: int) -> None:
        """A page was handed over anew, or the one after the last."""
        self._sequences[index : index + 1] = [sequence]

    def lose(self, index: int) -> None:
        """The page turned out not to be readable, in whatever version."""
        self._sequences[index] = None

    def cut(self, pages: int) -> list[PageKey]:
        """Keep the first `pages`; returns the others, which are the session's own.

        Raises RowRangeError when some of them are shared: others' pages are never cut.
        """
        if pages < self.shared_pages:
            raise RowRangeError(
                f"session {self.session!r} shares its first {self.shared_pages} pages; "
                f"it cannot be cut to {pages}"
            )
        gone = self.own_keys(pages)
        del self._sequences[pages:]
        return gone
