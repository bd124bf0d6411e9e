"""Host cache: memory for copies of sessions' rows, under one bound for all sessions of a worker."""

from collections import OrderedDict
from collections.abc import Callable
from threading import RLock


class HostCache:
    """Bytes of each session's copy of its rows; the least recently used session makes room.

    A copy is derived from stored rows: it may be dropped at any time and is made again when it is
    needed. Sessions with a running job are pinned: their copies stay, since the job reads them.

    The owner of the copies (`register`) reserves before it allocates. Safe to call from several
    threads.

    Attributes:
        limit_bytes: Most bytes of all sessions together.
        lock: Held while bytes are reserved or dropped.
        evictions: Number of copies that were dropped to make room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lock = RLock()
        self.evictions = 0
        self._drop: Callable[[str], None] = lambda _session: None
        self._bytes: OrderedDict[str, int] = OrderedDict()
        self._pinned: set[str] = set()

    @property
    def used_bytes(self) -> int:
        """Reserved bytes of all sessions."""
        with self.lock:
            return sum(self._bytes.values())

    def register(self, drop: Callable[[str], None]) -> None:
        """Set the function that frees a session's copy; called under `lock`, by any thread."""
        self._drop = drop

    def pin(self, session: str) -> None:
        """Keep the copy of a session whose job starts; the session is the last used one."""
        with self.lock:
            self._pinned.add(session)
            self._use(session)

    def unpin(self, session: str) -> None:
        """End a `pin`, when the job has ended."""
        with self.lock:
            self._pinned.discard(session)
            self._use(session)

    def reserve(self, session: str, nbytes: int) -> bool:
        """Reserve `nbytes` in all for a session's copy, and drop others' copies to make room.

        Returns False, and nothing is dropped or changed, where that does not give enough.
        """
        with self.lock:
            victims = self._choose_victims(session, nbytes)
            if victims is None:
                return False
            for name in victims:
                self._drop(name)
                del self._bytes[name]
                self.evictions += 1
            self._bytes[session] = nbytes
            self._use(session)
            return True

    def free(self, session: str) -> None:
        """Record that the owner has dropped a session's copy."""
        with self.lock:
            self._bytes.pop(session, None)

    def _use(self, session: str) -> None:
        if session in self._bytes:
            self._bytes.move_to_end(session)

    def _choose_victims(self, session: str, nbytes: int) -> list[str] | None:
        """Choose the copies to drop, so that the session may have `nbytes`; None: too few."""
        excess = self.used_bytes + nbytes - self._bytes.get(session, 0) - self.limit_bytes
        victims = list[str]()
        for name, held in self._bytes.items():
            if excess <= 0:
                break
            if name != session and name not in self._pinned:
                excess -= held
                victims.append(name)
        return victims if excess <= 0 else None
