"""Conditional requests: a client that has the current representation gets 304 without a body."""

from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

# Another version of kvrecall may describe the same state in another way.
_RELEASE = version("kvrecall")

NOT_MODIFIED: Mapping[int | str, dict[str, Any]] = {
    304: {"description": "Not modified: the client's `If-None-Match` has the current ETag."}
}


def build_tag(*parts: str | bytes) -> str:
    """Build an ETag of what a representation follows from: versions, or the body itself."""
    digest = blake2b(_RELEASE.encode(), digest_size=12)
    for part in parts:
        digest.update(b"\0" + (part if isinstance(part, bytes) else part.encode()))
    return f'"{digest.hexdigest()}"'


def is_current(request: Request, tag: str) -> bool:
    """Return whether the client has the representation of this tag already."""
    known = request.headers.get("if-none-match", "")
    return tag in (each.strip().removeprefix("W/") for each in known.split(","))


def build_unchanged(tag: str) -> Response:
    """Build the response to a client that has the current representation."""
    return Response(status_code=304, headers=_build_headers(tag))


def respond(body: BaseModel | bytes, tag: str) -> Response:
    """Build a response with a tag."""
    content = body if isinstance(body, bytes) else body.model_dump_json().encode()
    return Response(content, media_type="application/json", headers=_build_headers(tag))


def respond_if_changed(request: Request, view: BaseModel | bytes) -> Response:
    """Build a response that is tagged by its body, or one that it has not changed."""
    body = view if isinstance(view, bytes) else view.model_dump_json().encode()
    tag = build_tag(body)
    return build_unchanged(tag) if is_current(request, tag) else respond(body, tag)


def _build_headers(tag: str) -> dict[str, str]:
    return {"ETag": tag, "Cache-Control": "private, no-cache"}
