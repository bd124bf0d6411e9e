"""`kvrecall worker`: a process that computes for gateways in other processes."""

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvrecall.app.errors import CannotServe
from kvrecall.app.run import LISTENING, set_up_process, warn_about_reference_model
from kvrecall.app.settings import Settings
from kvrecall.cli.options import (
    Block,
    Data,
    Dtype,
    Log,
    MaxBudget,
    Model,
    Quantize,
    Ram,
    Slots,
    TlsCert,
    TlsKey,
    UntilInputEnds,
    build_settings,
    mebibytes,
)

if TYPE_CHECKING:
    from workers.rpc.registration import Registration
    from workers.rpc.service import WorkerService

Listen = Annotated[
    str | None,
    typer.Option(help="HOST:PORT to listen on; port 0: any free one. Default: 127.0.0.1:8421."),
]
Name = Annotated[
    str | None, typer.Option(help="Name of the worker in the cluster. Default: its address.")
]
Advertise = Annotated[
    str | None, typer.Option(help="HOST:PORT at which gateways reach it. Default: --listen.")
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(help="CA certificates, PEM, for client certificates. Default: not required."),
]


def worker_command(
    listen: Listen = None,
    name: Name = None,
    advertise: Advertise = None,
    model: Model = None,
    data: Data = None,
    slots: Slots = None,
    budget: MaxBudget = None,
    block: Block = None,
    ram: Ram = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    log: Log = None,
    until_input_ends: UntilInputEnds = False,
) -> None:
    """Run a worker: the model, its cache and the row store, over gRPC.

    Every setting can also be set in the environment (KVRECALL_...).
    """
    settings = build_settings(
        model=model,
        data=data,
        dtype=dtype,
        quantize=quantize,
        ram_bytes=mebibytes(ram),
        log=log,
        worker={"slots": slots, "max_budget": budget, "block_tokens": block},
        server={
            "listen": listen,
            "name": name,
            "advertise": advertise,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "tls_client_ca": tls_client_ca,
        },
    )
    set_up_process(settings, until_input_ends)
    asyncio.run(_run_worker(settings, Console()))


async def _run_worker(settings: Settings, console: Console) -> None:
    """Serve calls until SIGTERM or SIGINT, then drain. Raises CannotServe."""
    # torch takes seconds to import: other commands do without.
    from kvrecall.app.wiring import build_worker
    from workers.errors import CannotListen
    from workers.rpc.server import WorkerServer

    try:
        server = WorkerServer(settings.server)
    except CannotListen as error:
        raise CannotServe(str(error)) from error
    warn_about_reference_model(settings, console)
    service = build_worker(settings)
    stopped = _stop_event()
    registration = _build_registration(settings, server.address, service)
    await server.start(service)
    if registration is not None:
        await registration.start()
    console.print(f"{LISTENING}{server.address}", soft_wrap=True, highlight=False)
    await stopped.wait()
    if registration is not None:
        await registration.drain()
    await server.stop()
    if registration is not None:
        await registration.stop()
    await service.close()


def _stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def _build_registration(
    settings: Settings, address: str, service: "WorkerService"
) -> "Registration | None":
    """The worker's record in Redis, by which gateways find it; None without a shared catalog.

    Raises CannotServe.
    """
    from kvrecall.app.redis import redis_client
    from kvstore.errors import TierSettingsError
    from workers.rpc.registration import Registration

    if settings.catalog_url is None:
        return None
    address = settings.server.advertise or address
    name = settings.server.name or address
    try:
        client = redis_client(settings.catalog_url.get_secret_value())
    except TierSettingsError as error:
        raise CannotServe(str(error)) from error
    namespace = settings.store.redis_namespace
    return Registration(
        client, namespace, name, lambda draining: service.record(name, address, draining=draining)
    )
