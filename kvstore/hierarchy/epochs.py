"""Under which epoch this process writes each session, and which sessions others have taken over."""

from threading import Lock

from kvstore.errors import StaleWriterError


class WriterEpochs:
    """What was written under an earlier epoch and is still on its way goes under the one that holds now: the session
    is still this process's. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._now: dict[str, int] = {}
        self._stale: dict[str, int] = {}
        self._lock = Lock()

    def take(self, session: str, epoch: int) -> None:
        """The session is written under `epoch` from now on."""
        self._now[session] = epoch

    def now(self, session: str, epoch: int | None) -> int | None:
        """Under which epoch something goes that was handed over under `epoch`."""
        known = self._now.get(session)
        return epoch if known is None else max(known, epoch or 0)

    def note_stale(self, session: str, epoch: int) -> None:
        """Another writer has taken the session over since `epoch`."""
        with self._lock:
            self._stale[session] = max(epoch, self._stale.get(session, epoch))

    def is_stale(self, session: str, epoch: int) -> bool:
        """Whether another writer has taken the session over since `epoch`."""
        return self._stale.get(session, -1) >= epoch

    def require_writable(self, session: str, epoch: int) -> None:
        """Raise StaleWriterError when another writer has taken the session over since `epoch`."""
        if self.is_stale(session, epoch):
            raise StaleWriterError(
                f"session {session!r} was taken over: epoch {epoch} may not write it any more"
            )

    def forget(self, session: str) -> None:
        """The session is gone, and nothing of it on its way."""
        self._now.pop(session, None)
        self._stale.pop(session, None)
