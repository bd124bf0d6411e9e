"""Making a session be what was committed of it: from memory where nobody else can have written it, else from the tiers.

What the tiers hold beyond the committed rows was never committed, and must be gone from there before anything else is
written: whoever opens the session after this process takes the newest version of every page for right.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kvstore.errors import PageError, RowRangeError, StaleWriterError, TierFailedError
from kvstore.format.page import PageHeader, PageKey, PageLayout
from kvstore.format.page_table import PageTable, SharedPages
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.page_writer import PageWriter
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.sessions.state import SequenceNumbers, StoredSession
from kvstore.sessions.writer import RowWriter

Versions = Mapping[int, tuple[int, int]]
"""Of a session's pages, by index: the sequence number of the version that counts, and how many tokens it has."""


class SessionOpener:
    """Opens sessions, whose locks the caller holds.

    `versions_here(owner)` is what this process knows of another session's pages, None where it does not have it open.
    """

    def __init__(
        self,
        layout: PageLayout,
        stack: TierStack,
        writer: PageWriter,
        rows: RowWriter,
        numbers: SequenceNumbers,
        epochs: WriterEpochs,
        versions_here: Callable[[str], Versions | None],
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._writer = writer
        self._rows = rows
        self._numbers = numbers
        self._epochs = epochs
        self._versions_here = versions_here

    def open(
        self,
        state: StoredSession,
        epoch: int,
        length: int,
        shared: Sequence[SharedPages],
        of_owners: Mapping[str, Versions] | None = None,
    ) -> None:
        """Let the session have exactly `length` rows and be written under `epoch`.

        `of_owners`: what is known of the pages that it shares; looked up where it is not given. Raises
        StaleWriterError, RowRangeError, and a tier's error where it must answer and does not; then the session has to
        be opened again.
        """
        table = PageTable(state.name, shared)
        if length < table.shared_pages * self._layout.page_tokens:
            raise RowRangeError(
                f"session {state.name!r} shares {table.shared_pages} pages of "
                f"{self._layout.page_tokens} tokens, so it cannot have {length}"
            )
        if epoch < state.epoch:
            raise StaleWriterError(
                f"session {state.name!r} is written under epoch {state.epoch}; {epoch} is over"
            )
        if self._is_intact(state, epoch, length, table):
            self._reopen(state, epoch, length)
        else:
            self._settle(state, epoch)
            state.known = False
            self._rebuild(state, epoch, length, table, of_owners)
        state.known = True
        state.left = False
        if state.cut_due:
            self._finish_cut(state)

    def recover(self, state: StoredSession) -> None:
        """Let a session of an earlier process have the rows that its pages show, where only this one writes them."""
        headers = self._stack.headers(state.name)
        sequences = list[int]()
        length = 0
        while (header := headers.get(len(sequences))) is not None:
            sequences.append(header.sequence)
            length += header.valid_tokens
            if header.valid_tokens < self._layout.page_tokens:
                break
        state.epoch = max((header.epoch for header in headers.values()), default=0)
        state.table = PageTable(state.name, sequences=sequences)
        state.length = length
        state.known = True

    def _is_intact(self, state: StoredSession, epoch: int, length: int, table: PageTable) -> bool:
        """Whether memory has the rows: nobody else can have written the session between two successive epochs."""
        pages = -(-length // self._layout.page_tokens)
        return (
            state.known
            and (epoch - state.epoch <= 1 or self._has_what_tiers_lack(state))
            and not self._epochs.is_stale(state.name, state.epoch)
            and state.table.shared == table.shared
            and length <= state.length
            and not any(index < pages for index in state.table.lost())
        )

    def _has_what_tiers_lack(self, state: StoredSession) -> bool:
        """Whether rows are in memory alone, where no other process can have written newer ones."""
        if self._stack.tiers.lowest.shared:
            return False
        return self._writer.is_busy_with(state.name) or self._stack.placement.undurable(
            [state.name]
        )

    def _fence(self, state: StoredSession, epoch: int) -> None:
        try:
            self._stack.tiers.fence(state.name, epoch)
        except StaleWriterError:
            self._epochs.note_stale(state.name, state.epoch)
            state.known = False
            raise

    def _settle(self, state: StoredSession, epoch: int) -> None:
        """Let nothing of the session be on its way; what others may have superseded is not written any more."""
        if self._stack.tiers.lowest.shared and not (state.known and epoch - state.epoch <= 1):
            self._writer.forget(state.name)
            self._stack.placement.forget_owed(state.name)
        if self._writer.is_busy_with(state.name):
            self._writer.drain([state.name])
            self._writer.forget(state.name)

    def _reopen(self, state: StoredSession, epoch: int, length: int) -> None:
        """Go on from memory."""
        with suppress(TierFailedError):
            # Who wrote last writes on: if a tier does not answer now, the pages carry the epoch there.
            self._fence(state, epoch)
        state.epoch = epoch
        page_tokens = self._layout.page_tokens
        state.cut_due |= len(state.table) > length // page_tokens and length < state.length
        self._rows.truncate(state, length)

    def _rebuild(
        self,
        state: StoredSession,
        epoch: int,
        length: int,
        table: PageTable,
        of_owners: Mapping[str, Versions] | None,
    ) -> None:
        """Take what the tiers have."""
        self._fence(state, epoch)
        headers = self._stack.headers(state.name, epoch)
        versions: dict[str, Versions] = {state.name: _versions_of(headers)}
        for owner in table.owners - {state.name}:
            versions[owner] = (of_owners or {}).get(owner) or self._versions(owner)
        for header in headers.values():
            self._numbers.seen(header.sequence)
        state.epoch = epoch
        state.length = length
        state.tail = None
        state.unflushed = False
        self._fill(table, versions, length)
        state.table = table
        self._cut_stored(state, headers)

    def _versions(self, owner: str) -> Versions:
        """Of another session's pages: from memory where only this process writes, else from where all do."""
        here = None if self._stack.tiers.lowest.shared else self._versions_here(owner)
        if here is not None:
            return here
        return _versions_of(self._stack.headers(owner))

    def _fill(self, table: PageTable, versions: Mapping[str, Versions], length: int) -> None:
        page_tokens = self._layout.page_tokens
        for index in range(-(-length // page_tokens)):
            sequence, tokens = versions[table.key(index).session].get(index, (None, 0))
            whole = tokens >= min(page_tokens, length - index * page_tokens)
            table.append(sequence if whole else None)

    def _cut_stored(self, state: StoredSession, headers: Mapping[int, PageHeader]) -> None:
        """Delete what is stored beyond the session's rows, and have its last page written anew if it has too many."""
        own = range(state.table.shared_pages, len(state.table))
        stored = {PageKey(state.name, index) for index in headers} | self._stack.stored_keys(
            state.name, above=True
        )
        beyond = sorted(key for key in stored if key.index not in own)
        self._writer.discard(beyond, state.epoch)
        index, valid = divmod(state.length, self._layout.page_tokens)
        state.unflushed = bool(valid) and index in headers and headers[index].valid_tokens > valid
        state.cut_due = bool(beyond) or state.unflushed

    def _finish_cut(self, state: StoredSession) -> None:
        """Return when no tier has the rows that were cut. Raises what kept one from it."""
        try:
            self._rows.hand_over_unfinished_page(state, cut=True)
        except PageError:  # it cannot be read, and must not be read later by chance
            index = state.length // self._layout.page_tokens
            self._writer.discard([state.table.key(index)], state.epoch)
            state.table.lose(index)
            state.unflushed = False
        self._stack.tiers.try_again()
        for error in self._writer.drain([state.name]):
            raise error
        self._epochs.require_writable(state.name, state.epoch)
        state.cut_due = False


def _versions_of(headers: Mapping[int, PageHeader]) -> Versions:
    return {index: (header.sequence, header.valid_tokens) for index, header in headers.items()}
