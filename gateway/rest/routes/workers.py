"""Routes of workers: eviction methods, the served model, the load of each worker."""

from fastapi import APIRouter

from gateway.rest.schemas.workers import MethodsView, WorkersView, WorkerView
from services.service import SessionService


def add_worker_routes(router: APIRouter, service: SessionService) -> None:
    """Add all routes of workers."""

    @router.get("/methods", tags=["worker"])
    async def list_methods() -> MethodsView:
        """List the eviction methods and the repair, with the schemas of their settings."""
        return MethodsView.from_domain(service.info)

    @router.get("/workers", tags=["worker"])
    async def list_workers() -> WorkersView:
        """List the reachable workers with their load, their tiers and their counters."""
        return WorkersView.from_domain(*await service.describe_workers())

    @router.get("/worker", tags=["worker"])
    async def get_worker() -> WorkerView:
        """Get the served model and its limits."""
        return WorkerView.model_validate(service.info)
