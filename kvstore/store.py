"""The row store: every row of every session, written once, gathered by position, kept through restarts.

Rows are appended to a session's unfinished page in memory; a full page goes to the writer's thread and from
there into the tiers. Whoever must know that rows are safe calls `flush`.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Lock, RLock

import torch
from torch import Tensor

from kvstore.codec import Codec
from kvstore.errors import InvariantError, KvStoreError, RowRangeError, RowShapeError, StoreClosedError
from kvstore.gathering import ReadKeys, gather_selection, gather_tokens
from kvstore.page import HEADER_BYTES, PageHeader, PageKey, PageLayout, require_layout, session_name_bytes
from kvstore.page_writer import PageWriter, PendingPage
from kvstore.summaries import Bits, PageSummaries, PageSummary
from kvstore.tier_stack import ExpectedPage, TierCounters, TierStack
from kvstore.tiers.base import Tier


@dataclass(eq=False)
class _Session:
    """A session's rows: pages that were handed over, and the unfinished page in memory."""

    name: str
    lock: RLock = field(default_factory=RLock)
    length: int = 0
    sequences: list[int] = field(default_factory=list)
    """For each page handed over the sequence number of its newest version: the only one that may be read."""
    tail: Tensor | None = None
    """The page that token `length` will go to, full size; None when it must be made or read first."""
    unflushed: bool = False
    """Whether the unfinished page differs from the version that was handed over."""
    dropped: bool = False

    def expected(self, index: int) -> ExpectedPage:
        return ExpectedPage(PageKey(self.name, index), self.sequences[index])


class RowStore:
    """All rows of all sessions over `tiers`, fastest first; the last one is the truth and should be durable.

    Safe to call from several threads; calls for one session take turns. The store owns the tiers and closes
    them. At most `backlog_pages` full pages wait for the writer (then `append` waits); `read_batch_pages`
    bounds the pages that one gather holds in memory at a time. Summaries of full pages, with codes of
    `summary_bits`, take at most `summary_limit` bytes of memory; 0: none are made. Opening raises ForeignPageError
    when a tier holds pages of another layout.

    `codecs`: one per tier (`TierStack`), all RAW when not given. With INT8 in the lowest tier a page's rows change
    once, within the `append` that finishes the page; from then on every reader gets the decoded rows, from the
    writer's memory as from any tier, before and after a restart. An unfinished page is exact everywhere. Rows that
    `truncate` leaves of a finished page are quantised a second time when the page is finished again.
    """

    def __init__(self, layout: PageLayout, tiers: Sequence[Tier], *, backlog_pages: int = 64,
                 read_batch_pages: int = 16, summary_limit: int = 1 << 30, summary_bits: Bits = 12,
                 codecs: Sequence[Codec] | None = None) -> None:  # fmt: skip
        self._layout = layout
        self._stack = TierStack(layout, tiers, codecs)
        self._read_batch_pages = read_batch_pages
        self._summaries = PageSummaries(summary_limit, summary_bits)
        self._sessions: dict[str, _Session] = {}
        self._sessions_lock = Lock()
        self._closed = False
        try:
            headers = self._stored_headers()
        except KvStoreError:
            self._stack.close()
            raise
        self._sequences = count(1 + self._stack.highest_sequence())
        self._writer = PageWriter(self._write, self._delete, backlog_pages)
        self._recover(headers)

    @property
    def layout(self) -> PageLayout:
        """Shape, dtype and fingerprint of the rows."""
        return self._layout

    def append(self, session: str, rows: Tensor) -> int:
        """Add rows `[n_layers, 2, n_kv_heads, t, head_dim]` (copied) and return the session's new length in tokens.

        The first append makes the session. Raises RowShapeError, or a tier's error when pages cannot be
        written any more and the backlog is full; then no row was added.
        """
        tokens = rows.shape[3] if rows.dim() == 5 else 0
        if tuple(rows.shape) != self._layout.rows_shape(tokens) or rows.dtype != self._layout.dtype:
            raise RowShapeError(f"rows must be {self._layout.dtype} {self._layout.rows_shape(tokens)}, "
                                f"got {rows.dtype} {tuple(rows.shape)}")  # fmt: skip
        with self._locked(session, create=True) as state:
            page_tokens = self._layout.page_tokens
            if state.length % page_tokens + tokens >= page_tokens:
                self._writer.wait_for_room()
            done = 0
            while done < tokens:
                offset = state.length % page_tokens
                step = min(page_tokens - offset, tokens - done)
                self._tail(state).narrow(3, offset, step).copy_(rows.narrow(3, done, step))
                state.length += step
                state.unflushed = True
                done += step
                if state.length % page_tokens == 0:
                    self._hand_over_full_page(state)
            return state.length

    def length(self, session: str) -> int:
        """Tokens whose rows the session has; 0 for a session that does not exist."""
        state = self._sessions.get(session)
        return 0 if state is None else state.length

    def truncate(self, session: str, length: int) -> None:
        """Drop the rows from position `length` on. Raises RowRangeError when the session has fewer rows."""
        with self._locked(session) as state:
            if not 0 <= length <= state.length:
                raise RowRangeError(f"cannot truncate session {session!r} to {length} tokens: it has {state.length}")
            if length == state.length:
                return
            page_tokens = self._layout.page_tokens
            pages = -(-length // page_tokens)
            self._writer.discard([state.expected(index).key for index in range(pages, len(state.sequences))])
            del state.sequences[pages:]
            if length // page_tokens != state.length // page_tokens:
                state.tail = None
            state.length = length
            # The version that was handed over has more rows: a restart must not find them again.
            state.unflushed = length % page_tokens != 0

    def gather(self, session: str, positions: Tensor) -> Tensor:
        """Positions int64 `[m]` -> rows `[n_layers, 2, n_kv_heads, m, head_dim]`.

        Raises RowRangeError for a position the session does not have, and a PageError when a page is corrupt,
        foreign or lost.
        """
        with self._locked(session) as state:
            return gather_tokens(self._layout, positions, state.length, lambda pages: self._read(state, pages))

    def gather_heads(self, session: str, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One layer, each head its own rows: int64 `[n_kv_heads, m]` -> keys, values `[n_kv_heads, m, head_dim]`.

        Position -1 leaves zeros. Raises as `gather`.
        """
        return self._gather_layers(session, [positions], [layer])[0]

    def gather_selection(self, session: str, selection: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """A whole selection, each page read once: per layer int64 `[n_kv_heads, m_l]` -> keys, values.

        Keys and values are `[n_kv_heads, m_l, head_dim]`; position -1 means no row and leaves zeros. Raises as
        `gather`, and RowShapeError unless there is one entry per layer.
        """
        if len(selection) != self._layout.n_layers:
            raise RowShapeError(f"a selection has one entry per layer ({self._layout.n_layers}), got {len(selection)}")
        return self._gather_layers(session, selection, range(self._layout.n_layers))

    def scan_keys(self, session: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """The keys of positions start..stop-1, page by page: (first position, `[n_layers, n_kv_heads, t, head_dim]`).

        Copies of one page at a time; nothing is promoted between tiers. Raises as `gather`.
        """
        length = self.length(session)
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise RowRangeError(f"positions {start}..{stop} asked for, session {session!r} has {length} rows")
        page_tokens = self._layout.page_tokens
        for first in range(start - start % page_tokens, stop if start < stop else 0, page_tokens):
            begin, end = max(start, first), min(stop, first + page_tokens)
            with self._locked(session) as state:
                if end > state.length:
                    raise RowRangeError(f"session {session!r} was truncated to {state.length} during a scan")
                page = next(self._read(state, [first // page_tokens], promote=False))
                keys = page[:, 0].narrow(2, begin - first, end - begin).clone(memory_format=torch.contiguous_format)
            yield begin, keys

    def read_keys(self, session: str, pages: Sequence[int]) -> ReadKeys:
        """The keys of chosen pages, by index, all at once; nothing is promoted between tiers.

        Pages that have no summary get one if there is room. Raises as `gather`.
        """
        with self._locked(session) as state:
            self._require_pages(state, pages)
            keys, bytes_read = list[Tensor](), 0
            full = state.length // self._layout.page_tokens
            for index, (rows, delivered) in zip(pages, self._fetch(state, pages, promote=False), strict=True):
                bytes_read += HEADER_BYTES + rows.nbytes if delivered else 0
                if index < full:
                    self._summaries.make(state.expected(index), rows[:, 0])
                    keys.append(rows[:, 0])
                else:  # unfinished: it may be written to while the keys are in use
                    keys.append(rows[:, 0, :, : state.length % self._layout.page_tokens].clone())
            return ReadKeys(keys, bytes_read)

    def summaries(self, session: str, pages: Sequence[int]) -> list[PageSummary | None]:
        """The summaries of pages, by index; None where there is none (yet). Raises as `read_keys`."""
        with self._locked(session) as state:
            self._require_pages(state, pages)
            full = state.length // self._layout.page_tokens
            return [self._summaries.of(state.expected(index)) if index < full else None for index in pages]

    def summary_bytes(self) -> int:
        """Bytes of memory that the summaries of all sessions take."""
        return self._summaries.bytes

    def flush(self, session: str) -> None:
        """Return when every row of the session is in the lowest tier, and safe there. Raises what a tier failed with.

        After an error the rows are still readable; the next flush tries again.
        """
        with self._locked(session) as state:
            self._hand_over_unfinished_page(state)
        self._writer.drain(session)
        self._stack.lowest.flush()

    def drop(self, session: str) -> None:
        """Forget a session in every tier, for good. An unknown session is ignored. Raises what a tier failed with."""
        if session not in self._sessions:
            return
        with self._locked(session) as state:
            state.dropped = True
            with self._sessions_lock:
                self._sessions.pop(session, None)
            self._writer.discard([state.expected(index).key for index in range(len(state.sequences))])
        self._writer.drain(session)

    def retain(self, sessions: Collection[str]) -> list[str]:
        """Drop every session that is not among `sessions` (what the catalog knows) and return those dropped."""
        unknown = sorted(set(self.sessions()) - set(sessions))
        for session in unknown:
            self.drop(session)
        return unknown

    def sessions(self) -> list[str]:
        """The sessions that exist, sorted."""
        with self._sessions_lock:
            return sorted(self._sessions)

    def usage(self) -> dict[str, int]:
        """Bytes of the pages in each tier, headers included, by the tier's name."""
        return self._stack.used_bytes()

    def counters(self) -> dict[str, TierCounters]:
        """Hits, misses and bytes of each tier since the store was opened, by the tier's name."""
        return self._stack.counters()

    def check(self) -> None:
        """Wait for the writer, then raise InvariantError unless the tiers hold exactly the sessions' pages."""
        self._writer.drain()
        self._stack.check()
        with self._sessions_lock:
            states = list(self._sessions.values())
        expected: dict[PageKey, ExpectedPage] = {}
        for state in states:
            with state.lock:
                self._check_session(state)
                pages = [state.expected(index) for index in range(len(state.sequences))]
            expected |= {page.key: page for page in pages}
        found = {header.key: ExpectedPage(header.key, header.sequence) for header in self._stack.lowest.stored()}
        if found != expected:
            raise InvariantError(f"lost or stale pages: {sorted(expected.keys() - found.keys())}, pages of nobody: "
                                 f"{sorted(found.keys() - expected.keys())}, of {len(expected)}")  # fmt: skip

    def close(self) -> None:
        """Flush every session, then close the tiers, whatever the flush said. May be called twice."""
        if self._closed:
            return
        try:
            for session in self.sessions():
                with self._locked(session) as state:
                    self._hand_over_unfinished_page(state)
            self._writer.drain()
            self._stack.lowest.flush()
        finally:
            self._closed = True
            self._writer.close()
            self._stack.close()

    @contextmanager
    def _locked(self, session: str, *, create: bool = False) -> Iterator[_Session]:
        """The session's state with its lock held. Unless it shall be made, a session that is not there is empty."""
        while True:
            if self._closed:
                raise StoreClosedError("the row store is closed")
            state = self._sessions.get(session) or (self._new_session(session) if create else _Session(session))
            with state.lock:
                # Between finding a session and locking it another thread may have dropped it.
                if not state.dropped:
                    yield state
                    return

    def _new_session(self, session: str) -> _Session:
        session_name_bytes(session)
        with self._sessions_lock:
            return self._sessions.setdefault(session, _Session(session))

    def _write(self, pending: PendingPage) -> None:
        page, rows = pending.page, pending.rows
        self._stack.write(page, rows, pending.blob)
        if rows.shape[3] == self._layout.page_tokens:
            self._summaries.make(page, rows[:, 0])

    def _delete(self, keys: Sequence[PageKey]) -> None:
        self._summaries.forget(keys)
        self._stack.delete(keys)

    def _require_pages(self, state: _Session, pages: Sequence[int]) -> None:
        count = -(-state.length // self._layout.page_tokens)
        if pages and not 0 <= min(pages) <= max(pages) < count:
            raise RowRangeError(f"pages {min(pages)}..{max(pages)} asked for, session {state.name!r} has {count}")

    def _tail(self, state: _Session) -> Tensor:
        if state.tail is None:
            tail = torch.zeros(self._layout.rows_shape(self._layout.page_tokens), dtype=self._layout.dtype)
            index, valid = divmod(state.length, self._layout.page_tokens)
            if valid:
                stored = next(self._read(state, [index]))
                tail.narrow(3, 0, valid).copy_(stored.narrow(3, 0, valid))
            state.tail = tail
        return state.tail

    def _hand_over_full_page(self, state: _Session) -> None:
        assert state.tail is not None
        self._submit(state, state.length // self._layout.page_tokens - 1, state.tail)
        state.tail = None

    def _hand_over_unfinished_page(self, state: _Session) -> None:
        index, valid = divmod(state.length, self._layout.page_tokens)
        if valid and state.unflushed:
            self._submit(state, index, self._tail(state).narrow(3, 0, valid).clone())

    def _submit(self, state: _Session, index: int, rows: Tensor) -> None:
        sequence = next(self._sequences)
        page = ExpectedPage(PageKey(state.name, index), sequence)
        self._writer.submit(PendingPage(page, *self._stack.settled(page, rows)))
        state.sequences[index:] = [sequence]
        state.unflushed = False

    def _read(self, state: _Session, pages: Sequence[int], *, promote: bool = True) -> Iterator[Tensor]:
        """The pages' rows in the order asked for, from memory or the tiers, a batch at a time."""
        return (rows for rows, _ in self._fetch(state, pages, promote=promote))

    def _fetch(self, state: _Session, pages: Sequence[int], *, promote: bool) -> Iterator[tuple[Tensor, bool]]:
        """As `_read`, with whether a tier had to deliver the page."""
        for first in range(0, len(pages), self._read_batch_pages):
            batch = pages[first : first + self._read_batch_pages]
            in_memory = {index: rows for index in batch if (rows := self._in_memory(state, index)) is not None}
            below = [state.expected(index) for index in batch if index not in in_memory]
            read = {page.key.index: rows
                    for page, rows in zip(below, self._stack.read(below, promote=promote), strict=True)}  # fmt: skip
            for index in batch:
                yield (in_memory[index], False) if index in in_memory else (read[index], True)

    def _in_memory(self, state: _Session, index: int) -> Tensor | None:
        if state.tail is not None and index == state.length // self._layout.page_tokens:
            return state.tail
        pending = self._writer.pending(PageKey(state.name, index))
        return None if pending is None else pending.rows

    def _gather_layers(self, session: str, selection: Sequence[Tensor],
                       layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
        if not all(0 <= layer < self._layout.n_layers for layer in layers):
            raise RowShapeError(f"layers {list(layers)} asked for, the rows have {self._layout.n_layers}")
        with self._locked(session) as state:
            return gather_selection(self._layout, selection, state.length,
                                    lambda pages: self._read(state, pages), layers)  # fmt: skip

    def _stored_headers(self) -> list[PageHeader]:
        headers = list(self._stack.lowest.stored())
        for header in headers:
            require_layout(header, self._layout)
        return headers

    def _recover(self, headers: Sequence[PageHeader]) -> None:
        """Rebuild the sessions from the headers. Pages behind a gap or an unfinished page are of no use and go."""
        pages: dict[str, dict[int, PageHeader]] = {}
        for header in headers:
            pages.setdefault(header.key.session, {})[header.key.index] = header
        for name, by_index in pages.items():
            state = _Session(name)
            while len(state.sequences) in by_index:
                header = by_index.pop(len(state.sequences))
                state.sequences.append(header.sequence)
                state.length += header.valid_tokens
                if header.valid_tokens < self._layout.page_tokens:
                    break
            if state.length:
                self._sessions[name] = state
            self._writer.discard([header.key for header in by_index.values()])

    def _check_session(self, state: _Session) -> None:
        full, unfinished = divmod(state.length, self._layout.page_tokens)
        handed_over = len(state.sequences)
        if handed_over not in (full, full + 1 if unfinished else full):
            raise InvariantError(f"session {state.name!r}: {state.length} tokens, {handed_over} pages handed over")
        if unfinished and handed_over == full and state.tail is None:
            raise InvariantError(f"session {state.name!r}: its unfinished page is nowhere")
