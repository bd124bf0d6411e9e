"""Construction of the whole service in one process: worker, catalog and session service."""

from kvrecall.domain.errors import WorkerRefused
from kvrecall.metrics.page import Metrics
from kvrecall_server.app.access import build_access
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.local.worker import LocalWorkerClient
from kvrecall_server.app.relay import build_relay
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.wiring import build_worker
from services.service import SessionService


async def build_service(settings: Settings, metrics: Metrics | None = None) -> SessionService:
    """The session service with its worker in this process; catalog and rows in `settings.data`.

    `metrics`: the worker's, where they are shown. Raises CannotServe.
    """
    calls = build_worker(settings, metrics)
    try:
        catalog = await open_catalog(settings)
    except CannotServe:
        await calls.close()
        raise
    try:
        access = build_access(settings, catalog)
    except CannotServe:
        await catalog.close()
        await calls.close()
        raise
    worker = LocalWorkerClient(calls, catalog.id)
    try:
        await worker.describe()
    except WorkerRefused as refusal:
        await worker.close()
        await catalog.close()
        raise CannotServe(refusal.message) from refusal
    relay = build_relay(settings)
    return SessionService(worker, catalog, settings.service, access, relay, settings.sandbox)
