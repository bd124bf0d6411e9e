"""Opening of sessions: restore exactly the committed rows, from memory or from the tiers.

When no other process can have written a session since, it is restored from memory. Rows that the
tiers hold beyond the committed ones were never acknowledged. They are deleted before anything else
is written: the next process that opens the session takes the newest version of every page as valid.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kvstore.errors import MissingPageError, RowRangeError, StaleWriterError, TierFailedError
from kvstore.format.commit_history import CommitHistory, assume_history
from kvstore.format.page import PageHeader, first_sequence, get_epoch
from kvstore.format.page_table import PageTable, SharedPages
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.sessions.context import StoreContext
from kvstore.sessions.state import StoredSession
from kvstore.sessions.writer import RowWriter

Versions = Mapping[int, int]
"""Sequence number of the valid version of each page of a session, by index."""


class SessionOpener:
    """Opens sessions whose locks the caller holds.

    `get_local_versions(owner)` returns the page versions of another session, None when this process
    has not loaded it.
    """

    def __init__(
        self,
        context: StoreContext,
        rows: RowWriter,
        get_local_versions: Callable[[str], Versions | None],
    ) -> None:
        self._layout = context.layout
        self._stack = context.stack
        self._writer = context.writer
        self._epochs = context.epochs
        self._rows = rows
        self._get_local_versions = get_local_versions

    def open(
        self,
        state: StoredSession,
        epoch: int,
        length: int,
        shared: Sequence[SharedPages],
        history: CommitHistory | None = None,
        owner_versions: Mapping[str, Versions] | None = None,
        dropped: Sequence[range] = (),
    ) -> None:
        """Restore exactly `length` rows of the session and write it under `epoch` from now on.

        Stored rows that `history` does not make committed ones are missing (`assume_history`).
        `owner_versions` are known versions of the shared pages; others are looked up. `dropped`: numbers
        of pages that it has no more. Raises
        StaleWriterError, RowRangeError, or the error of a tier that must answer and does not; then
        the session must be opened again.
        """
        table = PageTable(state.name, shared, dropped=dropped)
        pages, behind = divmod(length, self._layout.page_tokens)
        if behind or table.count_stored(pages) < table.shared_pages:
            raise RowRangeError(
                f"session {state.name!r} cannot have {length} tokens: it has whole pages of "
                f"{self._layout.page_tokens}, and shares {table.shared_pages} of them"
            )
        if epoch < state.epoch:
            raise StaleWriterError(
                f"session {state.name!r} is written under epoch {state.epoch}; "
                f"epoch {epoch} has ended"
            )
        history = history or assume_history(epoch, length)
        if self._is_intact(state, epoch, length, table, history):
            self._reopen(state, epoch, length, dropped)
        else:
            self._drain(state, epoch)
            state.loaded = False
            self._load(state, epoch, length, table, history, owner_versions or {})
        state.loaded = True
        state.unopened = False
        if state.truncation_pending:
            self._finish_truncation(state)

    def get_fork_versions(
        self, parent: StoredSession, table: PageTable, length: int
    ) -> dict[str, Versions]:
        """Versions of the pages that a fork of `parent` with this table shares, by their owners.

        Raises RowRangeError unless the shared pages have `length` rows and the parent as many,
        MissingPageError when a shared page is missing.
        """
        page_tokens = self._layout.page_tokens
        pages = length // page_tokens
        if not (
            length == pages * page_tokens
            and table.count_stored(pages) == table.shared_pages <= parent.table.stored_pages
        ):
            raise RowRangeError(
                f"cannot fork {length} tokens with {table.shared_pages} shared pages of "
                f"{page_tokens}: parent {parent.name!r} has {parent.length} tokens"
            )
        known = parent.table.known_sequences()
        versions: dict[str, dict[int, int]] = {}
        for index in range(pages):
            stored = table.stored_index(index)
            if stored not in known:
                raise MissingPageError(
                    f"page {stored} of session {parent.name!r} was not found; its rows must be "
                    "computed again"
                )
            owner = parent.table.stored_key(stored).session
            versions.setdefault(owner, {})[stored] = known[stored]
        return dict(versions)

    def recover(self, state: StoredSession) -> None:
        """Load an unopened session with the contiguous rows that its stored pages have.

        Only for tiers that no other process writes. Raises a tier's error, ForeignPageError.
        """
        headers = self._stack.headers(state.name)
        sequences = list[int]()
        while (header := headers.get(len(sequences))) is not None and self._is_whole(header):
            sequences.append(header.sequence)
        # An unloaded session keeps its epoch, under which it may have written nothing.
        written = (header.sequence for header in headers.values())
        state.last_sequence = max(first_sequence(state.epoch), *written)
        state.epoch = get_epoch(state.last_sequence)
        state.table = PageTable(state.name, sequences=sequences)
        state.length = len(sequences) * self._layout.page_tokens
        state.loaded = True

    def _is_intact(
        self,
        state: StoredSession,
        epoch: int,
        length: int,
        table: PageTable,
        history: CommitHistory,
    ) -> bool:
        """Return whether memory has the committed rows, in the versions that the tiers have."""
        pages = length // self._layout.page_tokens
        stored = table.count_stored(pages)
        known = state.table.known_sequences()
        return (
            state.loaded
            and not state.unopened
            and (epoch - state.epoch <= 1 or not self._stack.tiers.lowest.shared)
            and stored * self._layout.page_tokens <= history.committed_tokens(state.epoch)
            and not self._epochs.is_stale(state.name, state.epoch)
            and state.table.shared == table.shared
            and stored <= state.table.stored_pages
            and all(table.stored_index(index) in known for index in range(pages))
        )

    def _fence(self, state: StoredSession, epoch: int) -> None:
        try:
            self._stack.tiers.fence(state.name, epoch)
        except StaleWriterError:
            self._epochs.mark_stale(state.name, state.epoch)
            state.loaded = False
            raise

    def _drain(self, state: StoredSession, epoch: int) -> None:
        """Finish or discard the session's queued tasks; superseded pages are not written."""
        if self._stack.tiers.lowest.shared and not (state.loaded and epoch - state.epoch <= 1):
            self._writer.discard(state.name)
            self._stack.placement.discard_pending(state.name)
        if self._writer.has_tasks(state.name):
            self._writer.drain([state.name])
            self._writer.discard(state.name)

    def _reopen(
        self, state: StoredSession, epoch: int, length: int, dropped: Sequence[range]
    ) -> None:
        """Continue from memory."""
        with suppress(TierFailedError):
            # If a tier does not answer now, the pages themselves carry the epoch there later.
            self._fence(state, epoch)
        state.epoch = epoch
        pages = length // self._layout.page_tokens
        state.truncation_pending |= state.table.stored_pages > pages + sum(map(len, dropped))
        self._rows.truncate(state, length, dropped)

    def _load(
        self,
        state: StoredSession,
        epoch: int,
        length: int,
        table: PageTable,
        history: CommitHistory,
        owner_versions: Mapping[str, Versions],
    ) -> None:
        """Load the session from the tiers."""
        self._fence(state, epoch)

        def accepts(header: PageHeader) -> bool:
            index, sequence = header.key.index, header.sequence
            return self._is_whole(header) and self._is_committed(history, index, sequence)

        headers = self._stack.headers(state.name, accepts)
        versions: dict[str, Versions] = {state.name: self._get_versions(headers)}
        for owner in table.owners - {state.name}:
            versions[owner] = owner_versions.get(owner) or self._find_versions(owner)
        state.epoch = epoch
        state.length = length
        state.behind = []
        self._fill_table(table, versions, length, history)
        state.table = table
        self._truncate_stored(state, headers)

    def _find_versions(self, owner: str) -> Versions:
        """Versions of another session: from memory when only this process writes, else stored."""
        shared = self._stack.tiers.lowest.shared
        local = None if shared else self._get_local_versions(owner)
        if local is not None:
            return local
        return self._get_versions(self._stack.headers(owner))

    def _fill_table(
        self,
        table: PageTable,
        versions: Mapping[str, Versions],
        length: int,
        history: CommitHistory,
    ) -> None:
        """Add the pages of `length` tokens; one that is not committed is missing."""
        for index in range(table.count_stored(length // self._layout.page_tokens)):
            entry = table.stored_entry(index)
            commits = history if entry is None else entry.history
            sequence = versions[table.stored_key(index).session].get(index)
            found = sequence is not None and self._is_committed(commits, index, sequence)
            table.append(sequence if found else None)

    def _get_versions(self, headers: Mapping[int, PageHeader]) -> Versions:
        return {index: each.sequence for index, each in headers.items() if self._is_whole(each)}

    def _is_whole(self, header: PageHeader) -> bool:
        """Return whether a page has all its rows: a broken header has none."""
        return header.valid_tokens == self._layout.page_tokens

    def _is_committed(self, history: CommitHistory, index: int, sequence: int) -> bool:
        """Return whether the rows of a page version are committed ones."""
        end = (index + 1) * self._layout.page_tokens
        return end <= history.committed_tokens(get_epoch(sequence))

    def _truncate_stored(self, state: StoredSession, headers: Mapping[int, PageHeader]) -> None:
        """Delete stored pages beyond the session's rows.

        Later versions get larger sequence numbers than all that are stored.
        """
        own = range(state.table.shared_pages, state.table.stored_pages)
        stored = [*headers.values(), *self._stack.headers_above(state.name)]
        for header in stored:
            state.last_sequence = max(state.last_sequence, header.sequence)
        beyond = sorted({header.key for header in stored if header.key.index not in own})
        self._writer.delete(beyond, state.epoch)
        state.truncation_pending = bool(beyond)

    def _finish_truncation(self, state: StoredSession) -> None:
        """Wait until no tier has truncated rows. Raises the error that prevented it."""
        self._stack.tiers.clear_failure()
        for error in self._writer.drain([state.name]):
            raise error
        self._epochs.require_writable(state.name, state.epoch)
        state.truncation_pending = False


def find_stored_sessions(stack: TierStack) -> set[str]:
    """Find the sessions that an earlier process left in unshared tiers.

    Raises ForeignPageError, or a tier's error.
    """
    return {header.key.session for header in stack.session_headers()}
