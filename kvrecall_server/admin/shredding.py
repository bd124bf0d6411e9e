"""Crypto-shredding: the deletion of a tenant's sessions, and of the key that all of it is encrypted under."""

from contextlib import suppress

from kvrecall.domain.errors import UnknownSession
from services.catalog.base import Catalog

_SESSIONS_AT_ONCE = 100


async def shred(catalog: Catalog, tenant: str) -> tuple[int, bool]:
    """Delete a tenant's sessions and its data key.

    The pages of the sessions are dead then, which the gateways have the workers delete. Returns the
    number of sessions, and whether there was a key. Raises CatalogError.
    """
    deleted = 0
    cursor: str | None = None
    while True:
        page = await catalog.sessions.get_page(_SESSIONS_AT_ONCE, cursor, tenant)
        for session in page.sessions:
            with suppress(UnknownSession):  # somebody else deleted it
                await catalog.sessions.delete(session.id, None)
                deleted += 1
        cursor = page.next_cursor
        if cursor is None:
            return deleted, await catalog.data_keys.delete(tenant)
