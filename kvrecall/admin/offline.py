"""Access to the data of a stopped service: catalog, durable tiers, page layout."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch

from kvrecall.app.catalog import open_catalog
from kvrecall.app.errors import CannotServe
from kvrecall.app.models import resolve_model
from kvrecall.app.settings import Settings
from kvrecall.app.wiring import durable_tiers, page_layout
from kvrecall.domain.errors import ServiceError
from kvstore.errors import KvStoreError
from kvstore.format.page import PageLayout
from kvstore.tiers.base import Tier
from services.catalog.base import Catalog
from workers.errors import ModelRefused
from workers.model.loader import load_model

_CLAIM_SECONDS = 600.0


def catalog_file(settings: Settings) -> Path:
    """Path of the SQLite catalog."""
    return settings.data / "catalog.sqlite3"


def pages_folder(settings: Settings) -> Path:
    """Folder of the NVMe tier's segment files."""
    return settings.data / "pages"


def has_catalog(settings: Settings) -> bool:
    """True if a catalog exists; opening a missing one would create it."""
    return settings.catalog_url is not None or catalog_file(settings).exists()


def has_pages(settings: Settings) -> bool:
    """True if a folder of pages exists; opening a missing one would create it."""
    return pages_folder(settings).is_dir()


@asynccontextmanager
async def open_stopped_catalog(settings: Settings) -> AsyncIterator[Catalog]:
    """The catalog, closed at the end. Raises CannotServe, also for service errors within."""
    catalog = await open_catalog(settings)
    try:
        yield catalog
    except ServiceError as error:
        raise CannotServe(error.message) from error
    finally:
        await catalog.close()


@asynccontextmanager
async def claimed(catalog: Catalog, session: str) -> AsyncIterator[None]:
    """Hold the session's lease meanwhile. Raises UnknownSession, SessionBusy."""
    holder = f"stopped-{secrets.token_hex(8)}"
    await catalog.leases.claim(session, holder, _CLAIM_SECONDS)
    try:
        yield
    finally:
        await catalog.leases.release(session, holder)


@contextmanager
def open_tiers(settings: Settings, layout: PageLayout) -> Iterator[list[Tier]]:
    """The durable tiers, fastest first, closed at the end; the last one is authoritative.

    Raises CannotServe, also for storage errors within.
    """
    tiers: list[Tier] = []
    try:
        tiers = durable_tiers(layout, settings.data, settings.store)
        yield tiers
    except KvStoreError as error:
        raise CannotServe(f"pages cannot be used: {error}") from error
    finally:
        for tier in tiers:
            tier.close()


def load_layout(settings: Settings) -> PageLayout:
    """The page layout of the configured model, which is loaded on the CPU. Raises CannotServe."""
    dtype = getattr(torch, settings.dtype) if settings.dtype else None
    try:
        path = resolve_model(settings.model)
        return page_layout(load_model(path, dtype, "cpu", quantize=settings.quantize))
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error
