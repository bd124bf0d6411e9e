"""Ids that a tenant's requests can name: of what it made itself, of another tenant, of nothing."""

import re
import threading
from collections import defaultdict, deque
from collections.abc import Sequence

from benchmarks.fuzz.requests import Request

_REFERENCE = re.compile(r"@(session|response|conversation|item|call|foreign|missing):(\d)")
_ID = re.compile(rb'"(?:id|call_id|session|previous_response_id)": ?"([A-Za-z0-9_-]{1,80})"')
_PREFIXES = {
    "s_": "session",
    "resp_": "response",
    "conv_": "conversation",
    "msg_": "item",
    "call_": "call",
}
_KEPT = 20


class World:
    """Ids by kind, the newest first. Safe for several threads."""

    def __init__(self, foreign: Sequence[str] = ()) -> None:
        self._ids: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._ids["foreign"].extend(foreign)
        self._lock = threading.Lock()

    def learn(self, body: bytes) -> None:
        """Note the ids in a reply."""
        with self._lock:
            for found in _ID.findall(body[: 1 << 16]):
                text = found.decode()
                for prefix, kind in _PREFIXES.items():
                    if text.startswith(prefix) and text not in self._ids[kind]:
                        self._ids[kind].appendleft(text)

    def add_foreign(self, text: str) -> None:
        """Note an id of another tenant."""
        with self._lock:
            self._ids["foreign"].appendleft(text)

    def resolve(self, text: str) -> str:
        """Replace the references in a text."""
        return _REFERENCE.sub(lambda match: self._get(match[1], int(match[2])), text)

    def resolve_request(self, request: Request) -> Request:
        """Replace the references in a request."""
        # Latin-1 has a character for every byte, so that bodies that are no text stay as they are.
        body = self.resolve(request.body.decode("latin-1")).encode("latin-1")
        headers = tuple((name, self.resolve(value)) for name, value in request.headers)
        return Request(
            request.door,
            request.method,
            self.resolve(request.path),
            headers,
            body,
            request.cut,
        )

    def _get(self, kind: str, number: int) -> str:
        with self._lock:
            known = self._ids[kind]
            return known[number] if number < len(known) else f"no-{kind}-{number}"
