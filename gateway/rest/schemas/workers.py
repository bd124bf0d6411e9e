"""What goes out over HTTP of the workers: what they serve, what they can do, what they have to do."""

import json
from typing import Any

from gateway.rest.schemas.views import View
from kvrecall.domain.worker_info import MethodInfo, WorkerInfo


class MethodView(View):
    """A way to evict, or to repair, and the JSON schema of its settings."""

    name: str
    summary: str
    settings_schema: dict[str, Any]

    @classmethod
    def of(cls, known: MethodInfo) -> "MethodView":
        """The view of what a worker describes."""
        return cls(
            name=known.name,
            summary=known.summary,
            settings_schema=json.loads(known.settings_schema or "{}"),
        )


class MethodsView(View):
    """The eviction methods a session may be created with, and what its `repair_settings` are."""

    methods: list[MethodView]
    repair: MethodView | None

    @classmethod
    def of(cls, info: WorkerInfo) -> "MethodsView":
        """The view of a worker's methods."""
        repair = None if info.repair is None else MethodView.of(info.repair)
        return cls(methods=[MethodView.of(known) for known in info.methods], repair=repair)


class WorkerView(View):
    """The model that is served, and the limits that follow from it."""

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
    """A worker that can be reached, and what it has to do. One that is `draining` takes no session any more."""

    name: str
    address: str
    slots: int
    free_slots: int
    queued: int
    sessions: int
    draining: bool


class WorkersView(View):
    """The workers that can be reached."""

    workers: list[WorkerLoadView]
