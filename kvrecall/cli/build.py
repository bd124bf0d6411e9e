"""Put a worker together: model, tokenizer, tiers, store, engine, scheduler."""

from pathlib import Path

import torch

from kvrecall.cli.in_process import InProcessWorker
from kvstore.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from workers.engine import Engine, Parts
from workers.model import LoadedModel, load_model
from workers.scheduler import Scheduler
from workers.settings import WorkerSettings
from workers.tokenizer import load_tokenizer


def build_worker(
    model: str | Path, data: Path, settings: WorkerSettings, *, ram_bytes: int, dtype: str | None = None
) -> InProcessWorker:
    """A worker in this process, its rows under `data`/pages.

    Raises ModelRefused, and kvstore errors when the directory is in use or holds another model's pages.
    """
    loaded = load_model(model, dtype=getattr(torch, dtype) if dtype else None)
    tokenizer = load_tokenizer(model, loaded.eos_token_ids)
    store = build_store(loaded, data, ram_bytes)
    return InProcessWorker(Scheduler(Engine(Parts(loaded, tokenizer, store, settings))), str(model))


def build_store(model: LoadedModel, data: Path, ram_bytes: int) -> RowStore:
    """The row store of a model: RAM first, then files under `data`/pages."""
    shape = model.shape
    layout = PageLayout(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        dtype=model.dtype,
        fingerprint=model.fingerprint,
    )
    return RowStore(layout, [RamTier(ram_bytes), NvmeTier(data / "pages")])
