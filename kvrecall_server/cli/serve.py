"""`kvrecall serve`: HTTP API, services and worker in one process."""

import asyncio
from typing import TYPE_CHECKING

from rich.console import Console

from kvrecall_server.app.progress import show_progress
from kvrecall_server.app.run import run_service, set_up_process, warn_about_reference_model
from kvrecall_server.app.start.preflight import check_start
from kvrecall_server.cli.options import (
    ApiKey,
    Block,
    Data,
    DeviceMapOption,
    Dtype,
    Grpc,
    Host,
    Log,
    MaxBudget,
    Model,
    Port,
    Quantize,
    Ram,
    Slots,
    UntilInputEnds,
    build_settings,
    mebibytes,
)

if TYPE_CHECKING:
    from services.service import SessionService


def serve_command(
    model: Model = None,
    data: Data = None,
    slots: Slots = None,
    budget: MaxBudget = None,
    block: Block = None,
    ram: Ram = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    device_map: DeviceMapOption = None,
    host: Host = None,
    port: Port = None,
    grpc: Grpc = None,
    api_key: ApiKey = None,
    log: Log = None,
    until_input_ends: UntilInputEnds = False,
) -> None:
    """Serve sessions over HTTP, and gRPC if asked to, in one process.

    Every setting can also be set in the environment (KVRECALL_...).
    """
    settings = build_settings(
        model=model,
        data=data,
        dtype=dtype,
        quantize=quantize,
        device_map=device_map,
        ram_bytes=mebibytes(ram),
        host=host,
        port=port,
        grpc={"listen": grpc},
        api_key=api_key,
        log=log,
        worker={"slots": slots, "max_budget": budget, "block_tokens": block},
    )
    from workers.metrics.catalogue import create_metrics

    set_up_process(settings, until_input_ends, "serve")
    check_start(settings)
    console = Console()
    metrics = create_metrics()

    async def build() -> "SessionService":
        warn_about_reference_model(settings, console)
        with show_progress(f"loading {settings.model}"):
            # torch takes seconds to import: other commands do without.
            from kvrecall_server.app.local.service import build_service

            return await build_service(settings, metrics)

    asyncio.run(run_service(settings, console, build, "serve", (metrics,)))
