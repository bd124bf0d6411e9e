"""Routes of workers: eviction methods, the served model, the load of each worker."""

from fastapi import APIRouter

from gateway.rest.schemas.workers import to_methods, to_worker, to_workers
from kvrecall import client
from services.service import SessionService


def add_worker_routes(router: APIRouter, service: SessionService) -> None:
    """Add all routes of workers."""

    @router.get("/methods", tags=["worker"])
    async def list_methods() -> client.Methods:
        """List the eviction methods and the repair, with the schemas of their settings."""
        return to_methods(service.info)

    @router.get("/workers", tags=["worker"])
    async def list_workers() -> client.Workers:
        """List the reachable workers with their load, their tiers and their counters."""
        return to_workers(*await service.describe_workers())

    @router.get("/worker", tags=["worker"])
    async def get_worker() -> client.Worker:
        """Get the served model and its limits."""
        return to_worker(service.info)
