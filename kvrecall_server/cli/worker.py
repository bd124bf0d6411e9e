"""`kvrecall worker`: a process that computes for gateways in other processes."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
from rich.console import Console

from kvrecall_server.app.advertise import get_advertised_address
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.logs import set_up_logs
from kvrecall_server.app.progress import show_progress
from kvrecall_server.app.ranks.launch import end_with_launcher, is_rank, launch_ranks
from kvrecall_server.app.run import LISTENING, set_up_process, warn_about_reference_model
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start.preflight import check_start
from kvrecall_server.app.tracing import EXPORT_SECONDS, build_tracer
from kvrecall_server.cli.options import (
    Block,
    Data,
    DeviceMapOption,
    Dtype,
    Log,
    MaxBudget,
    Model,
    Quantize,
    Ram,
    Slots,
    TensorParallel,
    UntilInputEnds,
    build_settings,
    mebibytes,
    setting,
)

if TYPE_CHECKING:
    from kvrecall.metrics.page import Metrics
    from workers.parallel.group import Group
    from workers.rpc.operations import OperationsServer
    from workers.rpc.registration import Registration
    from workers.rpc.service import WorkerService

OPERATIONS = "Metrics and probes on http://"
Listen = Annotated[
    str | None, setting("server__listen", "HOST:PORT to listen on; port 0: any free one.")
]
Name = Annotated[
    str | None, setting("server__name", "Name of the worker in the cluster. Default: its address.")
]
Advertise = Annotated[
    str | None,
    setting(
        "server__advertise",
        "HOST:PORT at which gateways reach it, or auto: this machine's address on the way to the "
        "catalog's Redis, with the port of --listen. Default: --listen.",
    ),
]
Ops = Annotated[
    str | None,
    setting(
        "server__ops_listen",
        "HOST:PORT for operators: /metrics, /healthz, /readyz over HTTP. Default: none.",
        "--ops",
    ),
]
TlsCert = Annotated[
    Path | None,
    setting("server__tls_cert", "Certificate chain of this process, PEM. Default: no TLS."),
]
TlsKey = Annotated[Path | None, setting("server__tls_key", "Private key of the certificate, PEM.")]
TlsClientCa = Annotated[
    Path | None,
    setting(
        "server__tls_client_ca",
        "CA certificates, PEM, for client certificates. Default: not required.",
    ),
]

_log = structlog.get_logger("kvrecall.process")


def worker_command(
    listen: Listen = None,
    name: Name = None,
    advertise: Advertise = None,
    ops: Ops = None,
    model: Model = None,
    data: Data = None,
    slots: Slots = None,
    budget: MaxBudget = None,
    block: Block = None,
    ram: Ram = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    device_map: DeviceMapOption = None,
    tensor_parallel: TensorParallel = None,
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
        device_map=device_map,
        tensor_parallel=tensor_parallel,
        ram_bytes=mebibytes(ram),
        log=log,
        worker={"slots": slots, "max_budget": budget, "block_tokens": block},
        server={
            "listen": listen,
            "name": name,
            "advertise": advertise,
            "ops_listen": ops,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "tls_client_ca": tls_client_ca,
        },
    )
    if is_rank():
        _run_rank(settings)
        return
    set_up_process(settings, until_input_ends, "worker", settings.server.name or "")
    check_start(settings)
    if settings.tensor_parallel > 1:
        launch_ranks(settings.tensor_parallel, settings.server.drain_seconds, sys.argv[1:])
        return
    asyncio.run(_run_worker(settings, Console()))


def _run_rank(settings: Settings) -> None:
    """Be one of a worker's ranks: rank 0 serves, the others follow it."""
    end_with_launcher()
    from kvrecall_server.app.ranks.follow import follow, join_ranks

    rank = int(os.environ["RANK"])
    set_up_process(settings, False, "worker", f"{settings.server.name or 'worker'} rank {rank}")
    if rank:
        follow(settings)
    else:
        asyncio.run(_run_worker(settings, Console(), lambda: join_ranks(settings)))


async def _run_worker(
    settings: Settings, console: Console, join: "Callable[[], Group] | None" = None
) -> None:
    """Serve calls until SIGTERM or SIGINT, then drain. Raises CannotServe.

    join: joins the other ranks of the worker, of whose processes this one serves.
    """
    from workers.errors import CannotListen
    from workers.metrics.catalogue import create_metrics
    from workers.rpc.server import WorkerServer

    tracer = build_tracer("worker")
    try:
        server = WorkerServer(settings.server, tracer)
        address = get_advertised_address(settings, server.address)
        name = settings.server.name or address
        metrics = create_metrics(name)
        operations = _serve_operators(settings, metrics)
    except CannotListen as error:
        raise CannotServe(str(error)) from error
    set_up_logs(settings.log, settings.log_level, "worker", name)
    warn_about_reference_model(settings, console)
    with show_progress(f"loading {settings.model}"):
        # torch takes seconds to import: an address in use is refused before.
        from kvrecall_server.app.wiring import build_worker

        service = build_worker(settings, metrics, None if join is None else join())
    stopped = _stop_event()
    registration = _build_registration(settings, address, service)
    await server.start(service)
    if registration is not None:
        await registration.start()
    if operations is not None:
        operations.ready = lambda: server.ready
        console.print(f"{OPERATIONS}{operations.address}", soft_wrap=True, highlight=False)
    _log.info("listening", address=server.address, model=settings.model)
    console.print(f"{LISTENING}{server.address}", soft_wrap=True, highlight=False)
    await stopped.wait()
    if registration is not None:
        await registration.drain()
    await server.stop()
    if registration is not None:
        await registration.stop()
    await service.close()
    if operations is not None:
        operations.close()
    tracer.close(EXPORT_SECONDS)


def _serve_operators(settings: Settings, metrics: "Metrics") -> "OperationsServer | None":
    """The HTTP port for operators, if there is one: from now on. Raises CannotListen."""
    from kvrecall.metrics.page import MetricsPage
    from workers.rpc.operations import OperationsServer

    if settings.server.ops_listen is None:
        return None
    page = MetricsPage("worker", version("kvrecall"), (metrics,))
    return OperationsServer(settings.server.ops_listen, page)


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
    from kvrecall_server.app.redis import redis_client
    from kvstore.errors import TierSettingsError
    from workers.rpc.registration import Registration

    if settings.catalog_url is None:
        return None
    name = settings.server.name or address
    try:
        client = redis_client(settings.catalog_url.get_secret_value())
    except TierSettingsError as error:
        raise CannotServe(str(error)) from error
    namespace = settings.store.redis_namespace
    return Registration(
        client,
        namespace,
        name,
        lambda draining: service.record(name, address, draining=draining),
        lambda: service.metrics.inc("worker_registry_failures_total"),
    )
