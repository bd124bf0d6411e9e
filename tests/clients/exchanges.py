"""What a server was asked, and how it answered: recorded around its application."""

import json
import re
from collections.abc import MutableSequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ENDPOINTS = ("/v1/messages", "/v1/responses", "/v1/chat/completions", "/v1/completions")
# By the names of chat completions and responses, and of Anthropic's messages.
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)')
_FAILED = re.compile(rb'"type":\s*"(?:error|response\.failed)"|^data: \{"error"', re.MULTILINE)
_MESSAGE = re.compile(rb'"message":\s*("(?:[^"\\]|\\.)*")')
# Places in lists, as the same member has another one in each request.
_PLACES = re.compile(r"\[\d+\]")
# A part's name and kind; where the header has no room, it ends with the number of the others.
_PART = re.compile(r"(?:\A|, )(?!and \d)([^,]+)")


@dataclass(frozen=True)
class Exchange:
    """A request to generate and its answer; `error` is the message of one that was refused or failed."""

    path: str
    status: int
    match: str
    ignored: tuple[str, ...]
    cached_tokens: int
    error: str

    @property
    def succeeded(self) -> bool:
        """True for an answer to its end."""
        return self.status == 200 and not self.error

    def __str__(self) -> str:
        """The line of a log."""
        return f"POST {self.path} {self.status} {self.match} {self.error}".rstrip()


class Recorder:
    """An application that records each exchange with another one."""

    def __init__(self, app: ASGIApp, exchanges: MutableSequence[Exchange]) -> None:
        self._app = app
        self._exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; those that generate nothing are only passed on."""
        if scope["type"] != "http" or scope["path"] not in _ENDPOINTS:
            await self._app(scope, receive, send)
            return
        status = 0
        headers: dict[bytes, bytes] = {}
        body = bytearray()

        async def record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update(message["headers"])
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, record)
        finally:
            self._exchanges.append(_read(scope["path"], status, headers, bytes(body)))


def _read(path: str, status: int, headers: dict[bytes, bytes], body: bytes) -> Exchange:
    cached = _CACHED.findall(body)
    failed = _FAILED.search(body)
    start = 0 if status >= 400 else failed.start() if failed else len(body)
    message = _MESSAGE.search(body, start)
    left_out = headers.get(b"kvrecall-ignored", b"").decode()
    return Exchange(
        path=path,
        status=status,
        match=headers.get(b"kvrecall-match", b"").decode(),
        ignored=tuple(_PART.findall(_PLACES.sub("[]", left_out))),
        cached_tokens=int(cached[-1]) if cached else 0,
        error=json.loads(message[1]) if message else "",
    )
