"""Construction of a worker: model, tokenizer, tiers, row store, engine, scheduler.

Imports nothing of the services, so that a worker's process needs no libraries of the gateway.
"""

from pathlib import Path

import torch

from kvrecall.app.calibration import known_profile
from kvrecall.app.errors import CannotServe
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
from kvstore.tiers.bounded import BoundedTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.errors import ModelRefused, ProfileRefused
from workers.model.embedder import Embedder
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import load_tokenizer
from workers.rpc.catalog_binding import CatalogBinding
from workers.rpc.service import WorkerService
from workers.scheduler.scheduler import Scheduler

# Rows in memory and in files, stored uncompressed.
TIERS = StoreSettings()


def build_worker(settings: Settings) -> WorkerService:
    """The worker service that an operator's settings describe. Raises CannotServe."""
    try:
        return build_worker_service(
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
        raise CannotServe(_describe_store_error(settings.data, error)) from error


def build_worker_service(
    model: str | Path,
    data: Path,
    settings: WorkerSettings,
    *,
    ram_bytes: int,
    dtype: str | None = None,
    tiers: StoreSettings = TIERS,
) -> WorkerService:
    """The worker service of a model: rows under `data`/pages, layer profile under `data`/profiles.

    `ram_bytes` is the size of the RAM tier. Raises ModelRefused, ProfileRefused, and kvstore errors
    when the directory is in use or holds another model's pages.
    """
    loaded = load_model(model, dtype=getattr(torch, dtype) if dtype else None)
    tokenizer = load_tokenizer(model, loaded.eos_token_ids)
    profile = known_profile(loaded, tokenizer, data, str(model))
    store = build_store(loaded, data, ram_bytes, tiers)
    parts = Parts(loaded, tokenizer, store, settings, profile.sensitivity if profile else None)
    return WorkerService(
        Scheduler(Engine(parts)),
        Embedder(settings.embedder, loaded.device),
        str(model),
        CatalogBinding(data / "pages" / "catalog-id"),
    )


def build_store(
    model: LoadedModel, data: Path, ram_bytes: int, tiers: StoreSettings = TIERS
) -> RowStore:
    """The row store of a model: a RAM tier of `ram_bytes`, then `durable_tiers`."""
    layout = page_layout(model)
    stack: list[Tier] = [RamTier(ram_bytes), *durable_tiers(layout, data, tiers)]
    return RowStore(layout, stack, summary_limit=tiers.summary_bytes, codecs=tiers.codecs)


def page_layout(model: LoadedModel) -> PageLayout:
    """The page layout of a model's rows: shape, dtype, fingerprint of the weights."""
    shape = model.shape
    return PageLayout(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        dtype=model.dtype,
        fingerprint=model.fingerprint,
    )


def durable_tiers(layout: PageLayout, data: Path, tiers: StoreSettings = TIERS) -> list[Tier]:
    """The tiers below RAM, fastest first: files under `data`/pages, then Redis if it is configured.

    The last tier is authoritative. Raises TierSettingsError, TierError, DirectoryLockedError.
    """
    stack: list[Tier] = [
        BoundedTier(
            NvmeTier(
                data / "pages",
                limit_bytes=tiers.nvme_bytes,
                reserve_bytes=tiers.nvme_reserve_bytes,
            )
        )
    ]
    if tiers.redis_url:
        stack.append(_redis_tier(layout, tiers, tiers.redis_url.get_secret_value()))
    return stack


def _redis_tier(layout: PageLayout, tiers: StoreSettings, url: str) -> RedisTier:
    return RedisTier(
        url,
        layout,
        namespace=tiers.redis_namespace,
        ttl_seconds=tiers.redis_ttl_seconds,
        limit_bytes=tiers.redis_bytes,
    )


def _describe_store_error(data: Path, error: Exception) -> str:
    if isinstance(error, DirectoryLockedError):
        return (
            f"data directory {data} is in use by another kvrecall; "
            "stop that one or choose another with --data"
        )
    if isinstance(error, ForeignPageError):
        return f"data directory {data} holds another model's rows; choose another with --data"
    if isinstance(error, (TierError, TierSettingsError)):
        return f"rows cannot be stored: {error}"
    return f"data directory {data} cannot be used: {error}"
