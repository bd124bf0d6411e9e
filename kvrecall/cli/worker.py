"""`kvrecall worker`: one process that computes, for a gateway in another one."""

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvrecall.app.errors import CannotServe
from kvrecall.app.run import LISTENING, say_what_is_served, set_up_process
from kvrecall.app.settings import LogFormat, Settings
from kvrecall.cli.options import given

if TYPE_CHECKING:
    from workers.rpc.registration import Registration
    from workers.rpc.service import WorkerService


def worker_command(
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT; port 0: any free one. Default: 127.0.0.1:8421.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What gateways call it. Default: its address.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="HOST:PORT where gateways reach it, if not --listen.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Causal LM, by path or hub name. Default: the reference.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where rows are kept. Default: ./kvrecall-data.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Sessions whose active rows are in memory.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Largest budget of a session, in rows.")
    ] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Tokens prefilled in one step.")] = None,
    ram: Annotated[
        int | None, typer.Option(min=1, help="MiB of rows in memory beside the files.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the model's.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain, PEM. Without it: no TLS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key of the certificate, PEM.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Who must have signed a gateway's certificate.")
    ] = None,
    log: Annotated[
        LogFormat | None, typer.Option(help="console or json, on standard error.")
    ] = None,
    until_input_ends: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
) -> None:
    """Compute for a gateway, over gRPC; every setting can also come from the environment (KVRECALL_...)."""
    worker = {"slots": slots, "max_budget": budget, "block_tokens": block}
    server = {
        "listen": listen,
        "name": name,
        "advertise": advertise,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
    }
    server |= {"tls_client_ca": tls_client_ca}
    chosen: dict[str, Any] = {"model": model, "data": data, "dtype": dtype, "log": log}
    if ram is not None:
        chosen["ram_bytes"] = ram << 20
    settings = Settings(**given({**chosen, "worker": given(worker), "server": given(server)}))
    set_up_process(settings, until_input_ends)
    asyncio.run(_run_worker(settings, Console()))


async def _run_worker(settings: Settings, console: Console) -> None:
    """Answer calls until a signal ends it, then drain. Raises CannotServe."""
    # torch takes seconds to import: other commands do without.
    from kvrecall.app.wiring import build_worker
    from workers.errors import CannotListen
    from workers.rpc.server import WorkerServer

    try:
        server = WorkerServer(settings.server)
    except CannotListen as error:
        raise CannotServe(str(error)) from error
    say_what_is_served(settings, console)
    calls = build_worker(settings)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    registration = _registration(settings, server.address, calls)
    await server.start(calls)
    if registration is not None:
        await registration.start()
    console.print(f"{LISTENING}{server.address}", soft_wrap=True, highlight=False)
    await ended.wait()
    if registration is not None:
        await registration.drain()
    await server.stop()
    if registration is not None:
        await registration.stop()
    await calls.close()


def _registration(
    settings: Settings, address: str, calls: "WorkerService"
) -> "Registration | None":
    """How the worker announces itself, where gateways look for workers in Redis. Raises CannotServe."""
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
        client, namespace, name, lambda draining: calls.record(name, address, draining=draining)
    )
