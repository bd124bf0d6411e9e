"""`kvrecall gateway`: HTTP API and services in a process without a model; workers compute."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.run import run_service, set_up_process
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.options import (
    ApiKey,
    Data,
    Grpc,
    Host,
    Log,
    Port,
    UntilInputEnds,
    build_settings,
    setting,
)

if TYPE_CHECKING:
    from services.cluster.registry import Registry
    from services.service import SessionService

Worker = Annotated[
    str | None,
    setting(
        "wire__worker",
        "HOST:PORT of the workers, separated by commas. "
        "Default: those registered in the catalog's Redis, or 127.0.0.1:8421.",
        default="",
    ),
]
TlsCa = Annotated[
    Path | None,
    setting(
        "wire__tls_ca", "CA certificates, PEM, for the workers' certificates. Default: no TLS."
    ),
]
TlsCert = Annotated[
    Path | None,
    setting("wire__tls_cert", "Certificate chain of this process, PEM. Default: no TLS."),
]
TlsKey = Annotated[Path | None, setting("wire__tls_key", "Private key of the certificate, PEM.")]


def gateway_command(
    worker: Worker = None,
    data: Data = None,
    host: Host = None,
    port: Port = None,
    grpc: Grpc = None,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    log: Log = None,
    until_input_ends: UntilInputEnds = False,
) -> None:
    """Serve sessions over HTTP, and gRPC if asked to, with workers in other processes.

    Every setting can also be set in the environment (KVRECALL_...).
    """
    settings = build_settings(
        data=data,
        host=host,
        port=port,
        grpc={"listen": grpc},
        api_key=api_key,
        log=log,
        wire={"worker": worker, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key},
    )
    set_up_process(settings, until_input_ends, "gateway")

    async def build() -> "SessionService":
        return await _build_service(settings)

    asyncio.run(run_service(settings, Console(), build))


async def _build_service(settings: Settings) -> "SessionService":
    """The session service over the workers that answer now, or will. Raises CannotServe."""
    # Imported here, like everything that only a server needs.
    from kvrecall_server.app.access import build_access
    from kvrecall_server.app.catalog import open_catalog
    from kvrecall_server.app.relay import build_relay
    from services.cluster.pool import WorkerPool
    from services.service import SessionService

    registry = build_registry(settings)
    catalog = await open_catalog(settings)
    try:
        access = build_access(settings, catalog)
        pool = await WorkerPool.start(registry, settings.wire, catalog.id)
    except OSError as error:
        await catalog.close()
        raise CannotServe(f"a certificate cannot be read: {error}") from error
    except CannotServe:
        await catalog.close()
        raise
    relay = build_relay(settings)
    service = SessionService(pool, catalog, settings.service, access, relay, settings.sandbox)
    pool.on_join(service.worker_joined)
    return service


def build_registry(settings: Settings) -> "Registry":
    """Build the registry of workers: the given addresses, or the catalog's Redis. Raises CannotServe."""
    from kvrecall_server.app.redis import redis_client
    from kvstore.errors import TierSettingsError
    from services.cluster.registry import RedisRegistry, StaticRegistry

    if settings.catalog_url is None or settings.wire.worker is not None:
        return StaticRegistry(settings.wire.workers)
    try:
        return RedisRegistry(
            redis_client(settings.catalog_url.get_secret_value()), settings.store.redis_namespace
        )
    except TierSettingsError as error:
        raise CannotServe(str(error)) from error
