"""Conditional requests: a client that has the current representation gets 304 without a body."""

from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

from fastapi import Request, Response

from gateway.rest.schemas.public import PublicValue, to_json

# Another version of kvrecall may describe the same state in another way.
_RELEASE = version("kvrecall")

NOT_MODIFIED: Mapping[int | str, dict[str, Any]] = {
    304: {"description": "Not modified: the client's `If-None-Match` has the current ETag."}
}


def _build_tag(*parts: str | bytes) -> str:
    """Build an ETag of what a representation follows from: versions, or the body itself."""
    digest = blake2b(_RELEASE.encode(), digest_size=12)
    for part in parts:
        digest.update(b"\0" + (part if isinstance(part, bytes) else part.encode()))
    return f'"{digest.hexdigest()}"'


async def respond_unless_current(
    request: Request, version: str, build: Callable[[], Awaitable[PublicValue]]
) -> Response:
    """Build a response that is tagged by a version; a client that has it costs no `build`."""
    tag = _build_tag(version)
    if _is_current(request, tag):
        return _build_unchanged(tag)
    return _respond(to_json(await build()), tag)


def respond_if_changed(request: Request, value: PublicValue | bytes) -> Response:
    """Build a response that is tagged by its body, or one that it has not changed."""
    body = value if isinstance(value, bytes) else to_json(value)
    tag = _build_tag(body)
    return _build_unchanged(tag) if _is_current(request, tag) else _respond(body, tag)


def _is_current(request: Request, tag: str) -> bool:
    known = request.headers.get("if-none-match", "")
    return tag in (each.strip().removeprefix("W/") for each in known.split(","))


def _build_unchanged(tag: str) -> Response:
    return Response(status_code=304, headers=_build_headers(tag))


def _respond(body: bytes, tag: str) -> Response:
    return Response(body, media_type="application/json", headers=_build_headers(tag))


def _build_headers(tag: str) -> dict[str, str]:
    return {"ETag": tag, "Cache-Control": "private, no-cache"}
