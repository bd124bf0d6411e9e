"""Host cache: pages of rows that sessions hold, in the memory that the RAM tier has the rest of."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from threading import RLock

from torch import Tensor

from kvrecall.domain.page_ids import PageId
from kvstore.index.key_codes import SharedCodes
from kvstore.tiers.ram import RamTier
from workers.engine.host.reserved_pages import Held, ReservedPages


class HostCache:
    """Pages that sessions hold, each once however many do; the least recently used session makes room.

    What is held can be read again: it may be dropped at any time. Sessions with a running job are
    pinned: theirs stays, since the job reads it.

    A session's owner reserves before it reads (`reserve`). What is reserved is taken from the RAM
    tier's limit, and the tier's copy of a page that is held where it lies counts no more. Safe to call
    from several threads.

    Attributes:
        lock: Held while bytes are reserved or dropped.
        evictions: Number of sessions that were dropped to make room.
        codes: Of the keys of pages that sessions hold.
    """

    def __init__(self, memory: RamTier, page_bytes: int, code_bytes: int = 0) -> None:
        """Begin without a session; page_bytes, code_bytes: of a page, and of the codes of its keys."""
        self.lock = RLock()
        self.codes = SharedCodes()
        self.evictions = 0
        self._memory = memory
        self._drop: Callable[[str], None] = lambda _session: None
        self._sessions: OrderedDict[str, Held] = OrderedDict()
        self._reserved = ReservedPages(page_bytes, code_bytes)
        self._rows: dict[PageId, Tensor] = {}
        self._pinned: set[str] = set()

    @property
    def used_bytes(self) -> int:
        """Reserved bytes of all sessions: of each page once."""
        with self.lock:
            own = sum(held.own_bytes for held in self._sessions.values())
            return self._reserved.nbytes + own

    def register(self, drop: Callable[[str], None]) -> None:
        """Set the function that frees what a session holds; called under `lock`, by any thread."""
        self._drop = drop

    def pin(self, session: str) -> None:
        """Keep what a session holds whose job starts; the session is the last used one."""
        with self.lock:
            self._pinned.add(session)
            self._use(session)

    def unpin(self, session: str) -> None:
        """End a `pin`, when the job has ended."""
        with self.lock:
            self._pinned.discard(session)
            self._use(session)

    def reserve(
        self,
        session: str,
        pages: Collection[PageId | None],
        own_bytes: int = 0,
        *,
        coded: bool = False,
    ) -> bool:
        """Reserve memory for exactly these pages of a session, and drop others' to make room.

        None: a page that may change, which no other session has. own_bytes: beside the pages. coded: with
        the codes of their keys. Returns False where that does not give enough: nothing is dropped
        or changed then, unless pages that no lower tier accepts have come in between.
        """
        final = [page for page in pages if page is not None]
        page_bytes = self._reserved.page_bytes + coded * self._reserved.code_bytes
        own_bytes += (len(pages) - len(final)) * page_bytes
        wanted = Held(frozenset(final), coded, own_bytes)
        with self.lock:
            victims = self._choose_victims(session, wanted)
            if victims is None:
                return False
            for name in victims:
                self._drop(name)
                self._forget(name)
                self.evictions += 1
            before = self._sessions.pop(session, Held())
            new = wanted.beyond(before)
            added = [page for page in new.pages if page not in self._reserved]
            # Added first, so that a page that only gains or loses its codes always has a holder.
            self._reserved.add(new)
            self._release(before.beyond(wanted))
            self._sessions[session] = wanted
            if self._memory.reserve(self.used_bytes, added):
                return True
            self.free(session)
            return False

    def get(self, page: PageId | None) -> Tensor | None:
        """Get the rows of a page that a session has read; None where none has."""
        with self.lock:
            return None if page is None else self._rows.get(page)

    def put(self, pages: Sequence[PageId | None], rows: Sequence[Tensor]) -> None:
        """Keep pages for all sessions that hold them; of those that may change, nothing is kept."""
        with self.lock:
            for page, of_page in zip(pages, rows, strict=True):
                if page is not None and page in self._reserved and page not in self._rows:
                    self._rows[page] = of_page
                    self._memory.hold(page, of_page.data_ptr())

    def free(self, session: str) -> None:
        """Record that the owner has dropped what a session held."""
        with self.lock:
            self._forget(session)
            self._memory.reserve(self.used_bytes)

    def _use(self, session: str) -> None:
        if session in self._sessions:
            self._sessions.move_to_end(session)

    def _forget(self, session: str) -> None:
        self._release(self._sessions.pop(session, Held()))

    def _release(self, held: Held) -> None:
        for page in self._reserved.remove(held):
            self._memory.release(page)
            self._rows.pop(page, None)

    def _choose_victims(self, session: str, wanted: Held) -> list[str] | None:
        """Choose the sessions to drop, so that this one may have what it wants; None: too few."""
        limit_bytes = self._memory.reservable_bytes
        before = self._sessions.get(session, Held())
        added = self._reserved.count_added(wanted.beyond(before))
        if self.used_bytes + added + wanted.own_bytes <= limit_bytes:
            return []  # as nearly always, without a look at all pages
        reserved = self._reserved.copy()
        reserved.add(wanted)
        reserved.remove(before)
        free = limit_bytes - sum(held.own_bytes for held in self._sessions.values())
        free += before.own_bytes - wanted.own_bytes
        victims = list[str]()
        for name, held in self._sessions.items():
            if reserved.nbytes <= free:
                break
            if name != session and name not in self._pinned:
                reserved.remove(held)
                free += held.own_bytes
                victims.append(name)
        return victims if reserved.nbytes <= free else None
