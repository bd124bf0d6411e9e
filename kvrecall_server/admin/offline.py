"""Access to the data of a stopped service: catalog, durable tiers, page layout."""

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from kvrecall.domain.errors import ServiceError
from kvrecall_server.admin.archive.pages import get_origin
from kvrecall_server.admin.archive.records import Origin
from kvrecall_server.admin.validation.bounds import Bounds
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.models import check_model, resolve_model
from kvrecall_server.app.progress import show_progress
from kvrecall_server.app.rank_storage import STATES, Rank
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start.preflight import read_shape, read_vocabulary
from kvrecall_server.app.tiers import cold_tier, durable_tiers
from kvstore.errors import KvStoreError
from kvstore.format.page import PageHeader, PageLayout
from kvstore.tiers.base import Tier
from services.catalog.base import Catalog
from workers.errors import ModelRefused

_CLAIM_SECONDS = 600.0


def catalog_file(settings: Settings) -> Path:
    """Path of the SQLite catalog."""
    return settings.data / "catalog.sqlite3"


def pages_folder(settings: Settings) -> Path:
    """Folder of the NVMe tier's segment files."""
    return settings.data / "pages"


def states_folder(settings: Settings) -> Path:
    """Folder of the segment files of recurrent states."""
    return settings.data / STATES / "pages"


def has_catalog(settings: Settings) -> bool:
    """True if a catalog exists; opening a missing one would create it."""
    return settings.catalog_url is not None or catalog_file(settings).exists()


def has_pages(settings: Settings, rank: Rank = Rank()) -> bool:
    """True if a folder of a rank's pages exists; opening a missing one would create it."""
    return pages_folder(rank.settings_of(settings)).is_dir()


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
def open_tiers(
    settings: Settings, rank: Rank = Rank(), *, states: bool = False, with_bucket: bool = False
) -> Iterator[list[Tier]]:
    """The durable tiers of a rank, fastest first, closed at the end; the last one is authoritative.

    Those of rows, or of recurrent states. `with_bucket`: behind them also the bucket, where one is
    configured.

    The model is loaded only where a tier names pages by its layout. Raises CannotServe, also for storage
    errors within.
    """
    part = rank.settings_of(settings)
    store = part.store
    needs_layout = store.redis_url is not None or (with_bucket and store.cold_url is not None)
    layout = load_layouts(settings, rank.count)[states] if needs_layout else None
    data = part.data / STATES if states else part.data
    tiers: list[Tier] = []
    try:
        tiers = durable_tiers(layout, data, store)
        if with_bucket and (bucket := cold_tier(layout, store)) is not None:
            tiers.append(bucket)
        yield tiers
    except KvStoreError as error:
        raise CannotServe(f"pages cannot be used: {error}") from error
    finally:
        for tier in tiers:
            tier.close()


def find_origin(settings: Settings, tiers: Sequence[Tier], ranks: int = 1) -> Origin:
    """The model and layout of the stored rows: of any page, or of the model where there is none.

    Only then the model is loaded. ranks: between which its heads are divided; the origin has all of them.
    Raises CannotServe.
    """
    headers = (header for tier in tiers for header in tier.stored())
    # An unreadable one has no layout.
    header = next((each for each in headers if each.page_tokens), None)
    return get_origin(load_layout(settings)) if header is None else get_whole_origin(header, ranks)


def get_whole_origin(header: PageHeader, ranks: int) -> Origin:
    """The model and layout of all heads, of a page of one of so many ranks."""
    origin = get_origin(header)
    return replace(origin, n_kv_heads=origin.n_kv_heads * ranks)


def read_origin(settings: Settings, rank: Rank = Rank()) -> Origin:
    """The same of a data directory, which is not created where it is missing. Raises CannotServe."""
    if not has_pages(settings, rank):
        return get_origin(load_layout(settings))
    with open_tiers(settings, rank) as tiers:
        return find_origin(settings, tiers, rank.count)


def find_bounds(settings: Settings, origin: Origin) -> Bounds:
    """The bounds of sessions whose rows are of this origin.

    The vocabulary is known where the configured model is on this machine and has such rows.
    """
    bounds = Bounds(n_layers=origin.n_layers, n_kv_heads=origin.n_kv_heads)
    shape, vocabulary = read_shape(settings), read_vocabulary(settings)
    if shape is None or vocabulary is None:
        return bounds
    found = (shape.n_layers, shape.n_kv_heads, shape.row_numbers)
    numbers = origin.head_dim if origin.latent else 2 * origin.head_dim
    known = found == (origin.n_layers, origin.n_kv_heads, numbers)
    return replace(bounds, vocabulary=vocabulary) if known else bounds


def load_layout(settings: Settings) -> PageLayout:
    """The page layout of the configured model, which is loaded on the CPU. Raises CannotServe."""
    return load_layouts(settings)[0]


def load_layouts(settings: Settings, ranks: int = 1) -> tuple[PageLayout, PageLayout | None]:
    """The same, and the layout of its recurrent states, if it has any. Raises CannotServe.

    ranks: between which the heads of rows are divided. States are whole on each of them.
    """
    try:
        check_model(settings.model)
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error
    with show_progress(f"loading {settings.model}, to know its rows"):
        rows, states = _load_layouts(settings)
    return replace(rows, n_kv_heads=rows.n_kv_heads // ranks), states


def _load_layouts(settings: Settings) -> tuple[PageLayout, PageLayout | None]:
    # torch takes seconds to import: data directories with pages do without.
    import torch

    from kvrecall_server.app.wiring import page_layout, state_layout
    from workers.model.loader import load_model

    dtype = getattr(torch, settings.dtype) if settings.dtype else None
    try:
        path = resolve_model(settings.model)
        model = load_model(path, dtype, "cpu", quantize=settings.quantize)
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error
    return page_layout(model), state_layout(model)
