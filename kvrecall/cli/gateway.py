"""`kvrecall gateway`: the front door and the services in one process, which computes nothing itself."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvrecall.app.errors import CannotServe
from kvrecall.app.run import run_service, set_up_process
from kvrecall.app.settings import LogFormat, Settings
from kvrecall.cli.options import given

if TYPE_CHECKING:
    from services.cluster.registry import Registry
    from services.service import SessionService


def gateway_command(
    worker: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of workers, with commas. Default: those in the catalog's Redis, or 127.0.0.1:8421."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the catalog is kept. Default: ./kvrecall-data.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0: any free port. Default: 8420.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Who has signed the worker's certificate. Unset: no TLS.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="This gateway's certificate, if workers ask for one.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key of the certificate, PEM.")
    ] = None,
    log: Annotated[
        LogFormat | None, typer.Option(help="console or json, on standard error.")
    ] = None,
    until_input_ends: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
) -> None:
    """Serve sessions over HTTP that workers compute; every setting can also come from the environment."""
    way = {"worker": worker, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    chosen: dict[str, Any] = {"data": data, "host": host, "port": port, "log": log}
    settings = Settings(**given({**chosen, "wire": given(way)}))
    set_up_process(settings, until_input_ends)

    async def build() -> "SessionService":
        return await _build_service(settings)

    asyncio.run(run_service(settings, Console(), build))


async def _build_service(settings: Settings) -> "SessionService":
    """The service of the workers that there are, one at least. Raises CannotServe."""
    # Imported here, as everything that only a server needs.
    from kvrecall.app.catalog import open_catalog
    from kvrecall.domain.errors import WorkerLost
    from services.cluster.pool import WorkerPool
    from services.service import SessionService

    try:
        fleet = await WorkerPool.start(_registry(settings), settings.wire)
    except OSError as error:
        raise CannotServe(f"a certificate cannot be read: {error}") from error
    except WorkerLost as error:
        raise CannotServe(error.message) from error
    try:
        catalog = await open_catalog(settings)
    except CannotServe:
        await fleet.close()
        raise
    service = SessionService(fleet, catalog, settings.service)
    fleet.on_join(service.worker_joined)
    return service


def _registry(settings: Settings) -> "Registry":
    """Where workers are looked for: at the addresses that were given, or in the catalog's Redis. Raises CannotServe."""
    from kvrecall.app.redis import redis_client
    from kvstore.errors import TierSettingsError
    from services.cluster.registry import RedisRegistry, StaticRegistry

    if settings.catalog_url is None or "worker" in settings.wire.model_fields_set:
        return StaticRegistry(settings.wire.workers)
    try:
        return RedisRegistry(
            redis_client(settings.catalog_url.get_secret_value()), settings.store.redis_namespace
        )
    except TierSettingsError as error:
        raise CannotServe(str(error)) from error
