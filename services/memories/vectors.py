"""Vectors of the passages of sessions, kept in this process while they are looked through."""

import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kvrecall.domain.episodes import Vectors, vectors_from_bytes
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Episodes

_MOST_BYTES = 64 * 2**20
# A session's passages are embedded after its turn: so long they are read again each time.
_SETTLED_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class PassageVectors:
    """The passages of one session that are embedded, in time order.

    Attributes:
        vectors: Unit vectors, float32 `[n, dimensions]`.
        spans: First token and the one behind the last, in the session's log, int64 `[n, 2]`.
    """

    vectors: Vectors
    spans: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return int(self.vectors.nbytes + self.spans.nbytes)


class VectorCache:
    """Passages of the sessions that were looked through last; at most 64 MiB."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes
        self._kept: OrderedDict[str, tuple[int, PassageVectors]] = OrderedDict()
        self._bytes = 0

    async def get(self, session: Session) -> PassageVectors:
        """Get a session's passages. Raises UnknownSession and CatalogError."""
        turns, known = self._kept.get(session.id, (0, None))
        if known is not None and turns == session.turns:
            self._kept.move_to_end(session.id)
            return known
        segments = await self._episodes.get_segments(session.id)
        dimensions = len(segments[0].vector) // 4 if segments else 0
        found = PassageVectors(
            vectors_from_bytes(b"".join(each.vector for each in segments), max(1, dimensions)),
            np.array([(each.start, each.stop) for each in segments], np.int64).reshape(-1, 2),
        )
        if time.time() - session.updated_at > _SETTLED_SECONDS:
            self._keep(session, found)
        return found

    def _keep(self, session: Session, found: PassageVectors) -> None:
        _, before = self._kept.pop(session.id, (0, None))
        self._bytes += found.nbytes - (0 if before is None else before.nbytes)
        self._kept[session.id] = session.turns, found
        while self._bytes > _MOST_BYTES:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
