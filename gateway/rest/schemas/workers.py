"""Workers: the served model and its limits, the methods, and the load of each worker."""

import json
from typing import Any

from gateway.rest.schemas.base import View
from kvrecall.domain.worker_info import MethodInfo, WorkerInfo


class MethodView(View):
    """Eviction method or repair, with the JSON schema of its settings."""

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
    """Eviction methods that a session may use, and the repair with its `repair_settings`."""

    methods: list[MethodView]
    repair: MethodView | None

    @classmethod
    def from_domain(cls, info: WorkerInfo) -> "MethodsView":
        """Convert from a worker's description."""
        repair = None if info.repair is None else MethodView.from_domain(info.repair)
        return cls(
            methods=[MethodView.from_domain(method) for method in info.methods], repair=repair
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


class WorkerLoadView(View):
    """Reachable worker and its load. A `draining` worker accepts no new sessions."""

    name: str
    address: str
    slots: int
    free_slots: int
    queued: int
    sessions: int
    draining: bool


class WorkersView(View):
    """Reachable workers."""

    workers: list[WorkerLoadView]
