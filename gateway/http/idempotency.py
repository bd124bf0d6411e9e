"""Idempotency keys: a write repeated with the same key runs once and gets the same response."""

import hashlib
from typing import Annotated

from fastapi import Header, Request
from pydantic import BaseModel

from gateway.http.tenants import TENANT_HEADER
from services.catalog.records import IdempotencyKey

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="Key of the write; a repeated request with the same key is not run again.",
    ),
]


def get_idempotency_key(
    request: Request, key: str | None, body: BaseModel | None = None
) -> IdempotencyKey | None:
    """Combine the client's key with the tenant, the route and a SHA-256 fingerprint of the body.

    Returns None when the client sent no key. Each tenant has its own keys.
    """
    if key is None:
        return None
    tenant = request.headers.get(TENANT_HEADER, "")
    operation = f"{request.method} {request.url.path}"
    return build_idempotency_key(
        tenant, operation, request.path_params.get("session", ""), key, body
    )


def build_idempotency_key(
    tenant: str, operation: str, session: str, key: str, body: BaseModel | None
) -> IdempotencyKey:
    """Build the record's key: that of a client, for one operation of a tenant, on one body."""
    text = "" if body is None else body.model_dump_json()
    # Tenant names contain neither spaces nor slashes, so scopes are unambiguous.
    scope = f"{tenant} {operation}".lstrip()
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return IdempotencyKey(scope, key, fingerprint, session, tenant)
