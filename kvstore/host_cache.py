"""Host cache: memory for what a worker derives from stored rows, under one bound for all sessions."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from threading import RLock
from typing import Literal, get_args

Kind = Literal["summaries", "copies"]
"""What is cached of a session: summaries of its pages, or a contiguous copy of its rows."""


class HostCache:
    """Bytes that each session has in the cache, by kind; the least recently used session goes first.

    All of it is derived from stored rows: it may be dropped at any time and is made again when it is
    needed. Sessions with a running job are pinned: their copies stay, since the job reads them. Page
    summaries only spare reads, so they make room for any session's copy, and take none of a pinned
    session's.

    Owners of a kind (`register`) hold the objects and reserve before they allocate. Safe to call from
    several threads.

    Attributes:
        limit_bytes: Most bytes of all sessions and kinds together.
        lock: Held while bytes are reserved or dropped. An owner that stores what it has reserved
            under the same lock is never dropped in between.
        evictions: How often a session's part of a kind was dropped to make room, by kind.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lock = RLock()
        self.evictions = Counter[Kind]()
        self._drops: dict[Kind, Callable[[str], None]] = {}
        self._sessions: OrderedDict[str, Counter[Kind]] = OrderedDict()
        self._pinned: set[str] = set()
        self._used = Counter[Kind]()

    @property
    def used_bytes(self) -> dict[Kind, int]:
        """Reserved bytes by kind."""
        return {kind: self._used[kind] for kind in get_args(Kind)}

    def get_bytes(self, session: str, kind: Kind) -> int:
        """Reserved bytes of a session's part of a kind."""
        held = self._sessions.get(session)
        return held[kind] if held else 0

    def register(self, kind: Kind, drop: Callable[[str], None]) -> None:
        """Set what frees a session's part of a kind; it is called under `lock`, by any thread."""
        self._drops[kind] = drop

    def pin(self, session: str) -> None:
        """Keep the copy of a session whose job starts; the session is the last used one."""
        with self.lock:
            self._pinned.add(session)
            self.use(session)

    def unpin(self, session: str) -> None:
        """End a `pin`, when the job has ended."""
        with self.lock:
            self._pinned.discard(session)
            self.use(session)

    def use(self, session: str) -> None:
        """Record that the session is the last used one, if it has anything here."""
        with self.lock:
            if session in self._sessions:
                self._sessions.move_to_end(session)

    def fits(self, session: str, kind: Kind, nbytes: int) -> bool:
        """Return whether `reserve` would succeed now; nothing is dropped."""
        with self.lock:
            return self._choose_victims(session, kind, nbytes) is not None

    def reserve(self, session: str, kind: Kind, nbytes: int) -> bool:
        """Reserve `nbytes` in all for a session's part of a kind, and drop others' to make room.

        Returns False, and nothing is dropped or changed, where that does not give enough.
        """
        with self.lock:
            victims = self._choose_victims(session, kind, nbytes)
            for name, part in victims or ():
                self._drops[part](name)
                self._set(name, part, 0)
                self.evictions[part] += 1
            if victims is not None:
                self._set(session, kind, nbytes)
            return victims is not None

    def free(self, session: str, kind: Kind) -> None:
        """Record that the owner has dropped a session's part of a kind."""
        with self.lock:
            self._set(session, kind, 0)

    def _choose_victims(
        self, session: str, kind: Kind, nbytes: int
    ) -> list[tuple[str, Kind]] | None:
        """Choose the parts to drop, so that the session's part may have `nbytes`; None: too few."""
        excess = self._used.total() + nbytes - self.get_bytes(session, kind) - self.limit_bytes
        victims = list[tuple[str, Kind]]()
        for name, part in self._evictable(session, kind):
            if excess <= 0:
                break
            if held := self.get_bytes(name, part):
                excess -= held
                victims.append((name, part))
        return victims if excess <= 0 else None

    def _evictable(self, session: str, kind: Kind) -> Iterator[tuple[str, Kind]]:
        """Yield the parts that make room for this one, in the order in which they go."""
        for name in self._sessions:
            if name != session and name not in self._pinned:
                yield name, "summaries"
                yield name, "copies"
        if kind == "copies":
            for name in self._sessions:
                if name == session or name in self._pinned:
                    yield name, "summaries"

    def _set(self, session: str, kind: Kind, nbytes: int) -> None:
        """Change a session's part; the session is the last used one if it has anything."""
        self._used[kind] += nbytes - self.get_bytes(session, kind)
        held = self._sessions.setdefault(session, Counter())
        held[kind] = nbytes
        self._sessions.move_to_end(session)
        if not held.total():
            del self._sessions[session]
