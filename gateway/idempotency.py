"""Idempotency keys: a write that is repeated with the same key is done once, and answered the same."""

import hashlib
from typing import Annotated

from fastapi import Header, Request
from pydantic import BaseModel

from gateway.tenants import TENANT
from services.catalog.records import IdempotencyKey

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="Repeats of one write share a key.",
    ),
]


def key_of(
    request: Request, key: str | None, body: BaseModel | None = None
) -> IdempotencyKey | None:
    """The client's key for this call, with a fingerprint of the body it was sent with. Each tenant has its own keys."""
    if key is None:
        return None
    text = "" if body is None else body.model_dump_json()
    # A tenant's name has neither a space nor a slash: no two scopes are the same text.
    scope = f"{request.headers.get(TENANT, '')} {request.method} {request.url.path}".lstrip()
    session = request.path_params.get("session", "")
    return IdempotencyKey(scope, key, hashlib.sha256(text.encode()).hexdigest(), session)
