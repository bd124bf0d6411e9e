"""Gauges of a worker that are read at each scrape, and counters that others keep."""

from collections.abc import Sequence
from itertools import product
from typing import get_args

import torch

from kvrecall.metrics.page import Metrics
from kvstore.hierarchy.metered import TierStatus
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.engine.stored.stored_sessions import StoredSessions
from workers.scheduler.job import JobKind, JobState
from workers.scheduler.scheduler import Scheduler


class ScrapedMetrics:
    """Brings the metrics of a worker up to date before they are read.

    The values are read beside the scheduler's thread, which changes them meanwhile: each is right
    for some moment of the scrape, and no scrape waits for a forward pass.
    """

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        """`model`: the name that the worker was started with."""
        self._scheduler = scheduler
        self._engine = scheduler.engine
        self._metrics = self._engine.metrics
        self._model = model

    def refresh(self) -> None:
        """Set the gauges, and advance the counters that engine and store keep."""
        engine, metrics = self._engine, self._metrics
        loaded = engine.model
        metrics.set(
            "worker_info",
            1.0,
            model=self._model,
            fingerprint=loaded.fingerprint,
            device=str(loaded.device),
        )
        metrics.set("worker_slots", engine.settings.slots)
        metrics.set("worker_slots_in_use", self._scheduler.slots_in_use())
        metrics.set("worker_sessions", len(engine.sessions))
        jobs = self._scheduler.count_jobs()
        for kind, state in product(get_args(JobKind), get_args(JobState)):
            metrics.set("worker_jobs", jobs[kind, state], kind=kind, state=state)
        metrics.advance("worker_prefilled_tokens_total", engine.prefilled_tokens)
        metrics.advance("worker_computed_tokens_total", engine.passed_tokens)
        metrics.advance("worker_lost_pages_total", engine.lost_pages)
        metrics.advance("worker_rebuilt_pages_total", engine.rebuilt_pages)
        _set_memory(metrics, engine)
        _set_devices(metrics, loaded.devices)
        _set_storage(metrics, engine.stored)


def _set_memory(metrics: Metrics, engine: Engine) -> None:
    """Set the rows and bytes of the sessions in slots."""
    rows = budget = nbytes = evicted = promoted = 0
    for session in tuple(engine.sessions.values()):
        slot = session.slot
        if slot is None:
            continue
        active = max(engine.cache.rows_per_head(slot))
        rows += active
        budget += _get_budget(engine, session)
        nbytes += engine.cache.active_bytes(slot)
        evicted += max(0, session.length - active)
        promoted += session.promoted_rows
    cache = engine.host_cache
    metrics.set("worker_host_cache_bytes", cache.used_bytes)
    metrics.advance("worker_host_cache_evictions_total", cache.evictions)
    metrics.set("worker_active_rows", rows)
    metrics.set("worker_budget_rows", budget)
    metrics.set("worker_active_bytes", nbytes)
    metrics.set("worker_evicted_tokens", evicted)
    metrics.set("worker_promoted_tokens", promoted)


def _get_budget(engine: Engine, session: WorkerSession) -> int:
    """The session's budget; a session that never evicts may fill its slot."""
    config = session.config
    return config.budget if config.method.evicts else engine.settings.max_budget


def _set_devices(metrics: Metrics, devices: Sequence[torch.device]) -> None:
    """Set the memory of the GPUs, together."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if not gpus:
        return
    for kind, read in (
        ("allocated", torch.cuda.memory_allocated),
        ("reserved", torch.cuda.memory_reserved),
    ):
        metrics.set("worker_device_memory_bytes", sum(map(read, gpus)), kind=kind)
    total = sum(torch.cuda.get_device_properties(device).total_memory for device in gpus)
    metrics.set("worker_device_memory_bytes", total, kind="total")


def _set_storage(metrics: Metrics, store: StoredSessions) -> None:
    pending, undurable = store.count_pending()
    metrics.set("worker_pending_pages", pending)
    metrics.set("worker_undurable_pages", undurable)
    for name, tier in store.tiers().items():
        _set_tier(metrics, name, tier)


def _set_tier(metrics: Metrics, name: str, tier: TierStatus) -> None:
    scope = "shared_tier" if tier.shared else "tier"
    metrics.set(f"{scope}_bytes", tier.used_bytes, tier=name)
    metrics.set(f"{scope}_limit_bytes", tier.limit_bytes, tier=name)
    metrics.set("tier_failed", float(tier.failure is not None), tier=name)
    counters = tier.counters
    for counter in ("hits", "misses", "errors", "refused_pages", "read_bytes", "written_bytes"):
        metrics.advance(f"tier_{counter}_total", getattr(counters, counter), tier=name)
    if counters.prefetched_pages:
        metrics.advance("prefetched_pages_total", counters.prefetched_pages)
    device = tier.device
    metrics.set("tier_free_bytes", None if device is None else device.free_bytes, tier=name)
    metrics.set("tier_dead_bytes", None if device is None else device.dead_bytes, tier=name)
    if device is not None:
        metrics.advance("tier_compactions_total", device.compactions, tier=name)
