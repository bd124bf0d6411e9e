"""Tenant of a request: a header that the routes can believe.

`gateway.http.authentication` sets it from the request's key, or lets a trusted proxy's pass; it never lets
a client's pass where keys are needed.
"""

from typing import Annotated

from fastapi import Header

from services.access.principals import MAX_TENANT_LENGTH, TENANT_NAME

TENANT_HEADER = "X-Kvrecall-Tenant"
Tenant = Annotated[
    str,
    Header(
        alias=TENANT_HEADER,
        min_length=1,
        max_length=MAX_TENANT_LENGTH,
        pattern=f"^{TENANT_NAME}$",
        description="Tenant that owns the sessions; a tenant sees only its own. Believed from trusted "
        "proxies, and on loopback where there is no key; else the key's tenant counts. Omitted: the "
        "default tenant.",
    ),
]
