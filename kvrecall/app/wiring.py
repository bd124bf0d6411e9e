"""Put the parts together: model, tokenizer, tiers, store, engine, scheduler; catalog and service on top."""

from pathlib import Path

import torch

from kvrecall.app.calibration import known_profile
from kvrecall.app.catalog import open_catalog
from kvrecall.app.errors import CannotServe
from kvrecall.app.local_worker import LocalWorkerClient
from kvrecall.app.settings import Settings
from kvstore.errors import (
    DirectoryLockedError,
    ForeignPageError,
    KvStoreError,
    TierError,
    TierSettingsError,
)
from kvstore.format.page import PageLayout
from kvstore.settings import StoreSettings
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier
from services.service import SessionService
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.errors import ModelRefused, ProfileRefused
from workers.model.embedder import Embedder
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import load_tokenizer
from workers.rpc.service import WorkerService
from workers.scheduler.scheduler import Scheduler

TIERS = StoreSettings()
"""Rows in memory and in files, as they are."""


async def build_service(settings: Settings) -> SessionService:
    """The whole service of one process: catalog and rows under `settings.data`. Raises CannotServe."""
    worker = LocalWorkerClient(build_worker(settings))
    try:
        catalog = await open_catalog(settings)
    except CannotServe:
        await worker.close()
        raise
    return SessionService(worker, catalog, settings.service)


def build_worker(settings: Settings) -> WorkerService:
    """What `build_calls` makes of an operator's settings. Raises CannotServe."""
    try:
        return build_calls(
            settings.model,
            settings.data,
            settings.worker,
            ram_bytes=settings.ram_bytes,
            dtype=settings.dtype,
            tiers=settings.store,
        )
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error
    except ProfileRefused as error:
        raise CannotServe(str(error)) from error
    except (KvStoreError, OSError) as error:
        raise CannotServe(_why_not(settings.data, error)) from error


def build_calls(
    model: str | Path,
    data: Path,
    settings: WorkerSettings,
    *,
    ram_bytes: int,
    dtype: str | None = None,
    tiers: StoreSettings = TIERS,
) -> WorkerService:
    """A worker's calls, its rows under `data`/pages, its model's layer profile under `data`/profiles.

    Raises ModelRefused, ProfileRefused, and kvstore errors when the directory is in use or holds another model's
    pages.
    """
    loaded = load_model(model, dtype=getattr(torch, dtype) if dtype else None)
    tokenizer = load_tokenizer(model, loaded.eos_token_ids)
    profile = known_profile(loaded, tokenizer, data, str(model))
    store = build_store(loaded, data, ram_bytes, tiers)
    parts = Parts(loaded, tokenizer, store, settings, profile.sensitivity if profile else None)
    return WorkerService(
        Scheduler(Engine(parts)), Embedder(settings.embedder, loaded.device), str(model)
    )


def build_store(
    model: LoadedModel, data: Path, ram_bytes: int, tiers: StoreSettings = TIERS
) -> RowStore:
    """The row store of a model: RAM first, then `durable_tiers`."""
    layout = layout_of(model)
    kept: list[Tier] = [RamTier(ram_bytes), *durable_tiers(layout, data, tiers)]
    return RowStore(layout, kept, summary_limit=tiers.summary_bytes, codecs=tiers.codecs)


def layout_of(model: LoadedModel) -> PageLayout:
    """How the rows of a model are stored."""
    shape = model.shape
    return PageLayout(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        dtype=model.dtype,
        fingerprint=model.fingerprint,
    )


def durable_tiers(layout: PageLayout, data: Path, tiers: StoreSettings = TIERS) -> list[Tier]:
    """Files under `data`/pages, then Redis if there is one: the last is the truth."""
    files = NvmeTier(
        data / "pages", limit_bytes=tiers.nvme_bytes, reserve_bytes=tiers.nvme_reserve_bytes
    )
    kept: list[Tier] = [files]
    if tiers.redis_url:
        url = tiers.redis_url.get_secret_value()
        ttl = tiers.redis_ttl_seconds
        limit = tiers.redis_bytes
        kept.append(
            RedisTier(
                url, layout, namespace=tiers.redis_namespace, ttl_seconds=ttl, limit_bytes=limit
            )
        )
    return kept


def _why_not(data: Path, error: Exception) -> str:
    if isinstance(error, DirectoryLockedError):
        return f"data directory {data} is in use by another kvrecall; stop that one or choose another with --data"
    if isinstance(error, ForeignPageError):
        return f"data directory {data} holds another model's rows; choose another with --data"
    if isinstance(error, (TierError, TierSettingsError)):
        return f"rows cannot be kept: {error}"
    return f"data directory {data} cannot be used: {error}"
