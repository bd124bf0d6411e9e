"""Writer epochs: the epoch under which this process writes each session, and lost sessions."""

from threading import Lock

from kvstore.errors import StaleWriterError


class WriterEpochs:
    """Current epoch of each session, and the sessions that other writers took over.

    Tasks that were submitted under an earlier epoch and are still queued run under the current
    one, because the session still belongs to this process. Safe to call from several threads.
    """

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._stale: dict[str, int] = {}
        self._lock = Lock()

    def begin(self, session: str, epoch: int) -> None:
        """Write the session under `epoch` from now on."""
        self._current[session] = epoch

    def current(self, session: str, epoch: int | None) -> int | None:
        """Epoch under which a task that was submitted under `epoch` runs now."""
        known = self._current.get(session)
        return epoch if known is None else max(known, epoch or 0)

    def mark_stale(self, session: str, epoch: int) -> None:
        """Record that another writer has taken the session over since `epoch`."""
        with self._lock:
            self._stale[session] = max(epoch, self._stale.get(session, epoch))

    def is_stale(self, session: str, epoch: int) -> bool:
        """Return whether another writer has taken the session over since `epoch`."""
        return self._stale.get(session, -1) >= epoch

    def require_writable(self, session: str, epoch: int) -> None:
        """Raise StaleWriterError when another writer has taken the session over since `epoch`."""
        if self.is_stale(session, epoch):
            raise StaleWriterError(
                f"session {session!r} was taken over: epoch {epoch} may not write it any more"
            )

    def forget(self, session: str) -> None:
        """Remove a session that was deleted and has no queued tasks."""
        self._current.pop(session, None)
        self._stale.pop(session, None)
