"""Workers: the served model and its limits, the methods, and the load of each worker."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.rest.schemas.base import View
from kvrecall.domain.worker_info import MethodInfo, WorkerInfo
from kvrecall.protocol.v1 import worker_pb2 as pb


class MethodView(View):
    """Eviction method, repair, prefill or retrieval, with the JSON schema of its settings."""

    name: str
    summary: str
    settings_schema: dict[str, Any]

    @classmethod
    def from_domain(cls, method: MethodInfo) -> "MethodView":
        """Convert from the domain value."""
        return cls(
            name=method.name,
            summary=method.summary,
            settings_schema=json.loads(method.settings_schema or "{}"),
        )


class MethodsView(View):
    """Eviction methods that a session may use, the repair, the prefill and the retrieval.

    Their settings are `method_settings`, `repair_settings`, `prefill` and `retrieve` of a session.
    """

    methods: list[MethodView]
    repair: MethodView | None
    prefill: MethodView | None
    retrieve: MethodView | None

    @classmethod
    def from_domain(cls, info: WorkerInfo) -> "MethodsView":
        """Convert from a worker's description."""
        repair = None if info.repair is None else MethodView.from_domain(info.repair)
        prefill = None if info.prefill is None else MethodView.from_domain(info.prefill)
        retrieve = None if info.retrieve is None else MethodView.from_domain(info.retrieve)
        return cls(
            methods=[MethodView.from_domain(method) for method in info.methods],
            repair=repair,
            prefill=prefill,
            retrieve=retrieve,
        )


class WorkerView(View):
    """Served model and its limits. Budgets in rows, `block_tokens` and `max_context` in tokens."""

    model: str
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    slots: int
    min_budget: int
    max_budget: int
    block_tokens: int
    max_context: int


class TierStatsView(View):
    """Contents of a storage tier, and its counters since the worker started.

    `limit_bytes` 0: none. `hits`, `misses` and `refused_pages` are pages, `reads` and `writes` calls,
    `errors` failed ones. `failure` is why the last of them failed, empty while the tier works.
    """

    name: str
    bytes: int
    limit_bytes: int
    hits: int
    misses: int
    errors: int
    refused_pages: int
    read_bytes: int
    written_bytes: int
    reads: int
    writes: int
    read_seconds: float
    write_seconds: float
    failure: str

    @classmethod
    def from_wire(cls, name: str, stats: pb.TierStats) -> "TierStatsView":
        """Convert from the worker's counters of a tier."""
        counters = {field: getattr(stats, field) for field in cls.model_fields if field != "name"}
        return cls(name=name, **counters)


class WorkerStatsView(View):
    """Slots and sessions of a worker now, and its counters since it started."""

    slots_in_use: int
    sessions: int
    queued: int
    lost_pages: int
    rebuilt_pages: int
    prefilled_tokens: int
    tiers: list[TierStatsView]

    @classmethod
    def from_wire(cls, stats: pb.WorkerStats | None) -> "WorkerStatsView | None":
        """Convert from the worker's counters; None for one that does not answer."""
        if stats is None:
            return None
        counters = {field: getattr(stats, field) for field in cls.model_fields if field != "tiers"}
        tiers = [TierStatsView.from_wire(name, tier) for name, tier in sorted(stats.tiers.items())]
        return cls(**counters, tiers=tiers)


class WorkerLoadView(View):
    """Reachable worker and its load. A `draining` worker accepts no new sessions.

    `stats` is null for a worker that does not answer now.
    """

    name: str
    address: str
    slots: int
    free_slots: int
    queued: int
    sessions: int
    draining: bool
    stats: WorkerStatsView | None

    @classmethod
    def from_wire(cls, record: pb.WorkerRecord, stats: pb.WorkerStats | None) -> "WorkerLoadView":
        """Convert from a worker's record and its counters."""
        load = {field: getattr(record, field) for field in cls.model_fields if field != "stats"}
        return cls(**load, stats=WorkerStatsView.from_wire(stats))


class WorkersView(View):
    """Reachable workers, by name."""

    workers: list[WorkerLoadView]

    @classmethod
    def from_domain(
        cls, records: Iterable[pb.WorkerRecord], stats: Mapping[str, pb.WorkerStats]
    ) -> "WorkersView":
        """Convert from the workers' records, and the counters of those that answer by name."""
        ordered = sorted(records, key=lambda record: record.name)
        return cls(
            workers=[WorkerLoadView.from_wire(each, stats.get(each.name)) for each in ordered]
        )
