"""Construction of the whole service in one process: worker, catalog and session service."""

from kvrecall.app.catalog import open_catalog
from kvrecall.app.errors import CannotServe
from kvrecall.app.local_worker import LocalWorkerClient
from kvrecall.app.settings import Settings
from kvrecall.app.wiring import build_worker
from services.service import SessionService


async def build_service(settings: Settings) -> SessionService:
    """The session service with its worker in this process; catalog and rows in `settings.data`.

    Raises CannotServe.
    """
    worker = LocalWorkerClient(build_worker(settings))
    try:
        catalog = await open_catalog(settings)
    except CannotServe:
        await worker.close()
        raise
    return SessionService(worker, catalog, settings.service)
