"""Counts of the tokens that were computed for each session, until they are taken."""

from collections import OrderedDict
from threading import Lock
from typing import Literal

from kvrecall.protocol.v1 import worker_pb2 as pb

TokenKind = Literal["prefilled", "decoded", "repaired", "settled"]

# Sessions that nobody asks for, as their gateway was lost, are forgotten one by one.
_MAX_SESSIONS = 100_000


class UsageMeter:
    """Counts computed tokens where they are computed, whatever becomes of the job. Thread-safe.

    - `prefilled`: prompts and recorded text in blocks, also after a loss and for episodes.
    - `decoded`: of answers.
    - `repaired`: observed by repairs, evictions and builds of episodes.
    - `settled`: computed again as blocks, between turns or before one.
    """

    def __init__(self) -> None:
        self._by_session: OrderedDict[str, pb.Usage] = OrderedDict()
        self._lock = Lock()

    def add(self, session: str, kind: TokenKind, tokens: int) -> None:
        """Count tokens of a session."""
        with self._lock:
            usage = self._by_session.setdefault(session, pb.Usage())
            _add(usage, kind, tokens)
            self._by_session.move_to_end(session)
            if len(self._by_session) > _MAX_SESSIONS:
                self._by_session.popitem(last=False)

    def recount(self, session: str, kind: TokenKind, tokens: int) -> None:
        """Count tokens as of this kind that were counted as prefilled and are not taken yet."""
        with self._lock:
            usage = self._by_session.get(session)
            if usage is not None:
                moved = min(tokens, usage.prefilled_tokens)
                _add(usage, "prefilled", -moved)
                _add(usage, kind, moved)

    def take(self, session: str) -> pb.Usage:
        """Return the counts of a session since they were last taken."""
        with self._lock:
            return self._by_session.pop(session, pb.Usage())


def _add(usage: pb.Usage, kind: TokenKind, tokens: int) -> None:
    name = f"{kind}_tokens"
    setattr(usage, name, getattr(usage, name) + tokens)
