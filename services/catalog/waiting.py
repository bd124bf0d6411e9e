"""Bounded waits for the catalog, of what has to be served without it."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from kvrecall.domain.errors import CatalogUnreachable

_T = TypeVar("_T")


async def ask_catalog(read: Awaitable[_T], patience: float | None) -> _T:
    """Wait for the catalog. Raises CatalogError, and CatalogUnreachable after `patience` seconds."""
    try:
        async with asyncio.timeout(patience):
            return await read
    except TimeoutError as error:
        raise CatalogUnreachable(
            f"the catalog did not answer within {patience:g} seconds"
        ) from error
